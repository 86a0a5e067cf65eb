"""Child processes that die, and what is left of a folder when a process dies at any change to it."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

AUDITED = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
"""Python's audit events for changes to folders, besides files opened for writing. `os.replace` is a rename."""
RELATIVE = ("os.remove", "os.rmdir")
"""Events whose path may be relative to an open folder, as in `shutil.rmtree`."""
CALLS = ("fsync", "pwrite")
"""Functions of `os` without an audit event. A killed `pwrite` has written the first half."""


def deaths(folder: Path, begin: Callable[[], Any], work: Callable[[], Any]) -> Iterator[int]:
    """Put `folder` into the state that a kill before each change would leave, and yield for each one in turn.

    `begin` is called, then `work` runs to its end in a fork of this process that copies the folder before each change.
    A copy holds what the kernel has, which is what a killed process leaves: its own buffers are lost.
    Yields the number of changes made so far. After the last one `folder` is complete.
    """
    begin()
    states = folder.with_name(f"{folder.name}-states")
    log = folder.with_name("work.log")
    assert forked(lambda: _record(folder, states, work), log) == 0, log.read_text()
    whole = states / "whole"
    shutil.copytree(folder, whole, symlinks=True)
    changes = len(os.listdir(states)) - 1
    assert changes > 3, "changes to the folder were not seen"
    for state in [*map(str, range(changes)), whole.name]:
        shutil.rmtree(folder)
        shutil.copytree(states / state, folder, symlinks=True)
        if state != whole.name:
            yield int(state)
    shutil.rmtree(states)


def _record(folder: Path, states: Path, work: Callable[[], Any]) -> None:
    prefix, made = str(folder) + os.sep, 0

    def change(half: Callable[[], Any] = lambda: None) -> None:
        nonlocal made
        half()
        shutil.copytree(folder, states / str(made), symlinks=True)
        made += 1

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            changes = isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        else:
            changes = event in AUDITED
        relative = event in RELATIVE and args[1] >= 0
        if changes and not isinstance(args[0], int) and (relative or os.fsdecode(args[0]).startswith(prefix)):
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
    work()


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
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def full_disk(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")
