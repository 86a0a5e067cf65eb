"""Real text found on every machine with Python: the standard library's own sources."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# Third-party code, tests, and the codec tables, which are lists of numbers.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}


def sources() -> Iterator[tuple[str, str]]:
    """Yields (path inside the standard library, text), in an order that depends on the paths alone."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    # Sorting by digest mixes the packages, so that a capped corpus is a sample of all of them.
    for path in sorted(paths, key=lambda path: hashlib.sha1(path.as_posix().encode()).digest()):
        if SKIPPED_FOLDERS.isdisjoint(path.parts):
            try:
                yield path.as_posix(), (root / path).read_text(encoding="utf-8")
            except UnicodeDecodeError:  # the library has a few sources in historical encodings
                continue
