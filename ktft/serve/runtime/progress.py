"""How far a server's loading is: a small JSON file for the process that started it, replaced as a whole."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

INTERVAL = 0.2
"""Seconds between two versions of the file. The reader polls about as often."""
READY = "ready"


@dataclass(frozen=True)
class Progress:
    """What the file says.

    Attributes:
        phase: a line for a person, such as `Packing experts (int8)`; `READY` once all weights are loaded.
        done, total: bytes of this phase; both 0 if it counts none.
        error: why loading failed; None if it did not.
    """

    phase: str
    done: int = 0
    total: int = 0
    error: str | None = None


class StatusFile:
    """Writes a `Progress` to a file; without a path it writes nothing."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._written = 0.0

    def write(self, progress: Progress) -> None:
        """Replace the file at once."""
        if self._path is None:
            return
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        beside.write_text(json.dumps(asdict(progress)))
        beside.replace(self._path)
        self._written = time.monotonic()

    def advance(self, progress: Progress) -> None:
        """Replace the file if it is `INTERVAL` old, or if this ends a phase."""
        if progress.done >= progress.total or time.monotonic() - self._written >= INTERVAL:
            self.write(progress)


def read_progress(path: Path) -> Progress | None:
    """What the file says; None while there is no file."""
    try:
        return Progress(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
