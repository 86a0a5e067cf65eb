"""Child processes that are killed before one of the changes that they make to a folder, whichever that is."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

AUDITED = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
"""Python's audit events of changes to folders; `os.replace` is a rename. Files opened for writing come to these."""
CALLS = ("fsync", "pwrite")
"""Functions of `os` that have no such event. Of a `pwrite` that is killed, the first half is written."""


def deaths(folder: Path, begin: Callable[[], Any], work: Callable[[], Any]) -> Iterator[int]:
    """Kill `work` before its first change to `folder`, before its second one, and so on, until it ends by itself.

    Each time is a fork of this process, and `begin` is called before it. Yields the number of changes made before.
    """
    number = 0
    while True:
        begin()
        if _forked(folder, work, number) == 0:
            assert number > 3, "changes to the folder were not seen"
            return
        yield number
        number += 1


def _forked(folder: Path, work: Callable[[], Any], last: int) -> int:
    """Returns 0 if it ended before change number `last`, -9 if that killed it."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            _die_at(folder, last)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), f"exit status {status}"
    return status


def _die_at(folder: Path, last: int) -> None:
    prefix, made = str(folder), 0

    def change(half: Callable[[], Any] = lambda: None) -> None:
        nonlocal made
        if made == last:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        made += 1

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            changes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            changes = event in AUDITED
        if changes and not isinstance(args[0], int) and os.fsdecode(args[0]).startswith(prefix):
            change()

    pwrite, fsync = os.pwrite, os.fsync

    def counted_pwrite(descriptor: int, data: Any, offset: int) -> int:
        change(lambda: pwrite(descriptor, memoryview(data)[: len(data) // 2], offset))
        return pwrite(descriptor, data, offset)

    def counted_fsync(descriptor: int) -> None:
        change()
        fsync(descriptor)

    os.pwrite, os.fsync = counted_pwrite, counted_fsync  # type: ignore[assignment]
    sys.addaudithook(hook)


def forked(function: Callable[[], Any], log: Path) -> int:
    """Run in a child process, which may be killed. Returns its exit status, minus the signal if one ended it."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            status = function() or 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def full_disk(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")
