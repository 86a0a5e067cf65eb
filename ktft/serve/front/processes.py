"""A server's processes: one group, ended as a whole, and not outliving the one that started it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_POLL = 0.1  # seconds
_KILL_AFTER = 10.0  # seconds that processes have between SIGTERM and SIGKILL


def members(group: int) -> Iterator[int]:
    """Processes of a group that are not over. Nobody may have waited for one that is."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # In bytes: a name is whatever its process called itself, and need not be text in any encoding
            name, _, rest = stat.read_bytes().rpartition(b") ")
        except OSError:  # ended meanwhile
            continue
        state, _, number = rest.split()[:3]
        if int(number) == group and state not in b"ZX":
            yield int(name.partition(b" ")[0])


def end_group(group: int, patience: float = _KILL_AFTER) -> None:
    """SIGTERM to all that is left of a group, SIGKILL to what is left of it `patience` seconds later."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not any(members(group)):
            return
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + patience
        while any(members(group)) and time.monotonic() < deadline:
            time.sleep(_POLL)


def follow(parent: int) -> None:
    """End this process's group once its parent is not `parent` any more, however that one ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGTERM)
        time.sleep(_KILL_AFTER)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="ktft-follow", daemon=True).start()
