"""`KTFT_TRACE=file`: the first steps as a Chrome trace (JSON array format), for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import IO, Any

from ktft.config import TRACE_STEPS
from ktft.spans import KINDS, ON_HOST, Interval
from ktft.train.report import logger

ROWS = ("steps", *dict.fromkeys(kind.row for kind in KINDS.values()), ON_HOST)
MAX_EVENTS = 500_000
"""The most spans of a trace, about 90 MB. With very many layers or micro-batches it ends before its last step."""


def require_writable(path: Path) -> None:
    """Raise ValueError, with the reason, for a file to which no trace can be written."""
    try:
        existed = path.exists()
        path.open("ab").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ValueError(
            f"KTFT_TRACE is {str(path)!r}, which cannot be written ({error.strerror}); give a file in a directory that "
            "exists and is yours, or unset it"
        ) from None


class Trace:
    """A trace file in progress, which replaces one that exists and ends after `steps` steps.

    A step's spans are written when it ends, so a killed run keeps those of earlier steps: the format allows the closing
    bracket to be missing. Raises ValueError if the file cannot be written.
    """

    def __init__(self, path: Path, steps: int = TRACE_STEPS) -> None:
        require_writable(path)
        self.path, self.left = path, steps
        self._zero = time.perf_counter()
        self._until: float | None = None  # the last step's end; earlier spans of a device may still arrive
        self._events = 0
        self._lines: list[str] = []
        self._between = "[\n"
        self._file: IO[str] | None = path.open("w")
        self._put({"ph": "M", "name": "process_name", "args": {"name": "ktft"}})
        for number, row in enumerate(ROWS):
            self._put({"ph": "M", "name": "thread_name", "tid": number, "args": {"name": row}})
            self._put({"ph": "M", "name": "thread_sort_index", "tid": number, "args": {"sort_index": number}})
        self._write()

    def __call__(self, over: Interval) -> None:
        if self._file is None or (self._until is not None and over.begin >= self._until):
            return
        if self._events == MAX_EVENTS:
            self.close()
            return
        where = "" if over.layer is None else f" {over.layer}"
        event = {"name": over.name + where, "cat": over.name, **self._place(over.row, over.begin, over.end)}
        seconds = max(over.end - over.begin, 1e-9)
        args: dict[str, Any] = {} if over.layer is None else {"layer": over.layer}
        if over.bytes:
            args |= {"bytes": int(over.bytes), "GB/s": round(over.bytes / seconds / 1e9, 3)}
        if over.flops:
            args |= {"flops": int(over.flops), "TFLOPS": round(over.flops / seconds / 1e12, 3)}
        self._put(event | ({"args": args} if args else {}))
        self._events += 1

    def step(self, number: int, begin: float, end: float) -> None:
        """Add a finished step whose spans have been added, and write them."""
        if self._file is None:
            return
        if self._until is not None:
            self.close()
            return
        self._put({"name": f"step {number}", "cat": "step", **self._place("steps", begin, end)})
        self._write()
        self.left -= 1
        if self.left <= 0:
            self._until = end

    def close(self) -> None:
        self._write("\n]\n")
        if self._file is None:
            return
        self._file.close()
        self._file = None
        later = ", and no later ones" if self._until is not None or self._events == MAX_EVENTS else ""
        where = "ui.perfetto.dev or chrome://tracing"
        logger().info("KTFT_TRACE: %s has %d spans%s; open it in %s", self.path, self._events, later, where)

    def _place(self, row: str, begin: float, end: float) -> dict[str, Any]:
        start, length = (begin - self._zero) * 1e6, (end - begin) * 1e6
        return {"ph": "X", "ts": round(start, 3), "dur": round(length, 3), "tid": ROWS.index(row)}

    def _put(self, event: dict[str, Any]) -> None:
        self._lines.append(self._between + json.dumps(event | {"pid": os.getpid()}))
        self._between = ",\n"

    def _write(self, tail: str = "") -> None:
        if self._file is None:
            return
        try:
            self._file.write("".join(self._lines) + tail)
            self._file.flush()
        except OSError as error:
            logger().warning("KTFT_TRACE: %s ends here: %s. Training goes on", self.path, error.strerror)
            self._file = None
        self._lines.clear()
