"""How far a server's loading is, for the process that started it: a small JSON file, replaced as a whole."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

INTERVAL = 0.2  # seconds between two files: a reader polls about as often
READY = "ready"


@dataclass(frozen=True)
class Progress:
    """What the file says.

    Attributes:
        phase: for a person, for instance `Packing experts (int8)`; `READY` once all weights are loaded.
        done, total: bytes of this phase; 0 where it has none to count.
        error: why loading ended; None while it goes on.
    """

    phase: str
    done: int = 0
    total: int = 0
    error: str | None = None


class StatusFile:
    """Writes `Progress`; without a path it writes nothing."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None else Path(path)
        self._written = 0.0

    def write(self, progress: Progress) -> None:
        """Replace the file now."""
        if self._path is None:
            return
        beside = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        beside.write_text(json.dumps(asdict(progress)))
        beside.replace(self._path)
        self._written = time.monotonic()

    def advance(self, progress: Progress) -> None:
        """Replace the file if the last one is `INTERVAL` old, or this is the end of a phase."""
        if progress.done >= progress.total or time.monotonic() - self._written >= INTERVAL:
            self.write(progress)


def read_progress(path: Path) -> Progress | None:
    """What the file says; None while there is none."""
    try:
        return Progress(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
