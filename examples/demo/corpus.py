"""Stage 1: real text found on every machine with Python, the standard library's own sources."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Third-party code, tests, and the codec tables, which are lists of numbers.
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
HELDOUT_EVERY = 16  # one file in sixteen is held out, from pretraining and from LoRA alike


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


def collect(out: Path, max_bytes: int) -> dict[str, Any]:
    """Writes `train.jsonl` and `heldout.jsonl`, one {"path", "text"} per file, at most `max_bytes` of text in all."""
    splits: dict[str, list[dict[str, str]]] = {"train": [], "heldout": []}
    total = 0
    for index, (path, text) in enumerate(sources()):
        if total + len(text) > max_bytes:
            break
        total += len(text)
        splits["heldout" if index % HELDOUT_EVERY == 0 else "train"].append({"path": path, "text": text})
    if not all(splits.values()):
        raise RuntimeError(f"Found only {total} bytes of Python sources in {sysconfig.get_paths()['stdlib']}.")
    for split, files in splits.items():
        (out / f"{split}.jsonl").write_text("".join(json.dumps(file) + "\n" for file in files), encoding="utf-8")
    return {"bytes": total, **{f"{split}_files": len(files) for split, files in splits.items()}}


def read(folder: Path, split: str) -> list[dict[str, str]]:
    """The files of one split, as `collect` wrote them."""
    return [json.loads(line) for line in (folder / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
