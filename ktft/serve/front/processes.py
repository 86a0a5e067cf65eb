"""A server's processes: they form one group, which ends as a whole, and which ends with the process that started it."""

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
    """The processes of a group, without zombies: those have ended, but nobody has waited for them."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # A process names itself, and the name need not be text in any encoding, so this reads bytes
            name, _, rest = stat.read_bytes().rpartition(b") ")
        except OSError:  # it has ended meanwhile
            continue
        state, _, number = rest.split()[:3]
        if int(number) == group and state not in b"ZX":
            yield int(name.partition(b" ")[0])


def end_group(group: int, patience: float = _KILL_AFTER) -> None:
    """Send SIGTERM to all that is left of a group, and SIGKILL to what is left `patience` seconds later."""
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
    """End this process's group once process `parent` has ended, in whatever way."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.killpg(0, signal.SIGTERM)
        time.sleep(_KILL_AFTER)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="ktft-follow", daemon=True).start()
