"""Another process that holds a folder, as a second run does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOLD = """
import sys
from pathlib import Path
from ktft.checkpoint.lock import locked
with locked(Path(sys.argv[1]), "training", *map(Path, sys.argv[2:])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another(directory: Path, *file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds `directory` until the block ends or the process is killed."""
    command = [sys.executable, "-c", HOLD, str(directory), *map(str, file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.communicate()
