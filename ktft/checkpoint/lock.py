"""Allows one writer per folder, by a lock file that names its holder. The lock of a process that died is taken over.

The lock is the kernel's (`flock`) on that file, which network file systems pass on to their server. On a file system
without locks the file's content still shows whether its holder runs on this machine.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

logger = logging.getLogger("ktft")

LOCK = "_ktft.lock"
"""Name of the file in a locked folder. Hubs' uploads leave out names that begin so."""

_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_CURES = {
    errno.EROFS: "it is mounted read-only: mount it for writing, or give a folder on another disk",
    errno.EACCES: "this user may not write there: change its owner or mode, or give another folder",
    errno.ENOSPC: "its disk is full: make room, or give a folder on another disk",
    errno.EDQUOT: "this user's quota is used up: make room, or give a folder on another disk",
    errno.ENOTDIR: "a part of that path is a file: give another folder",
    errno.EEXIST: "it is a file: give a folder",
}


@dataclass(frozen=True)
class Holder:
    """A process that writes into a folder.

    Attributes:
        what: what the process does there.
        host, boot, pid, started: which process. `boot` is Linux's boot id and `started` the kernel's clock ticks from
            there on, so that a process number used again, or a clock that was set, cannot deceive.
        since: local time, for people.
    """

    what: str
    host: str
    boot: str
    pid: int
    started: int
    since: str

    @classmethod
    def here(cls, what: str) -> Holder:
        """This process."""
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        return cls(what, socket.gethostname(), _boot(), os.getpid(), _started(os.getpid()), since)

    @classmethod
    def read(cls, content: bytes) -> Holder | None:
        """What a lock file says; None if it is empty or damaged."""
        try:
            found = cls(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        return found if all(type(v) is t for v, t in zip(asdict(found).values(), _TYPES, strict=True)) else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.what} since {self.since})"

    @property
    def is_here(self) -> bool:
        """Whether it is of this machine and was started since it booted."""
        return (self.host, self.boot) == (socket.gethostname(), _boot())

    @property
    def runs(self) -> bool:
        """Whether it is seen to run. One of another machine is not."""
        return self.is_here and self.started == _started(self.pid)


_TYPES = (str, str, str, int, int, str)


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _started(pid: int) -> int:
    """When a process began, in clock ticks since the machine booted; 0 if it has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if state in (b"Z", b"X") else int(fields[18])
    except (OSError, ValueError, IndexError):
        return 0


# --- holding ----------------------------------------------------------------------------------------------------------

_guard = threading.Lock()
_held: dict[str, list[int]] = {}  # lock file -> its descriptor, and how often this process holds it


@contextmanager
def locked(directory: Path, what: str, file: Path | None = None) -> Iterator[bool]:
    """Keep other processes' writers out of `directory`, which is made if need be. One process may hold it repeatedly.

    Args:
        what: what this process does there, for the message that other processes get.
        file: the lock file; by default `LOCK` in the directory.

    Yields:
        Whether this process did not hold it before.

    Raises:
        ValueError: another process holds it; the message names it.
        OSError: nothing can be written there.
    """
    path = os.path.realpath(file or directory / LOCK)
    with _guard:
        first = path not in _held
        if first:
            _held[path] = [_take(path, directory, what), 0]
        _held[path][1] += 1
    try:
        yield first
    finally:
        with _guard:
            if path in _held:  # a forked child holds nothing
                _held[path][1] -= 1
                if not _held[path][1]:
                    _drop(path)


def _take(path: str, directory: Path, what: str) -> int:
    """Returns the descriptor that holds the lock."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        descriptor = _open_locked(path)
    except BlockingIOError:
        with suppress(OSError):
            if holder := Holder.read(Path(path).read_bytes()):
                raise ValueError(_in_use(directory, str(holder), holder)) from None
        raise ValueError(_in_use(directory, "another process", None)) from None
    except OSError as error:
        raise _unwritable(directory, error) from error
    try:
        _succeed(directory, Holder.read(os.pread(descriptor, 1 << 16, 0)))
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(asdict(Holder.here(what))).encode())
        return descriptor
    except OSError as error:  # a full disk: an empty lock would say nothing
        with suppress(OSError):
            os.unlink(path)
        os.close(descriptor)
        raise _unwritable(directory, error) from error
    except BaseException:
        os.close(descriptor)
        raise


def _open_locked(path: str) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _BUSY:
                    raise BlockingIOError from None
                logger.info("%s: this file system has no locks (%s)", path, error.strerror)
            with suppress(FileNotFoundError):  # its last holder may have removed it between the two calls
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _succeed(directory: Path, before: Holder | None) -> None:
    """Say whose lock is taken over.

    Raises:
        ValueError: the holder before runs: locks mean nothing on this file system.
    """
    if before is None or (before.is_here and before.pid == os.getpid()):
        return
    if before.runs:
        raise ValueError(_in_use(directory, str(before), before))
    if before.is_here:
        ended = "which has ended without giving it back"
    elif before.host == socket.gethostname():
        ended = "which ended when this machine was booted"
    else:
        ended = "which holds it no longer, as far as can be seen from here; if it runs still, end one of the two"
    logger.warning("%s: taken over from %s, %s", directory, before, ended)


def _in_use(directory: Path, holder: str, found: Holder | None) -> str:
    end = f"end it (kill {found.pid})" if found is not None and found.is_here else "end it"
    return f"{directory} is in use by {holder}; wait for that, {end}, or give another folder (output_dir)"


def _unwritable(directory: Path, error: OSError) -> OSError:
    cure = _CURES.get(error.errno or 0, "give another folder")
    told = OSError(f"{directory} cannot be written ({error.strerror}); {cure}")
    told.errno = error.errno
    return told


def _drop(path: str) -> None:
    descriptor, _ = _held.pop(path)
    with suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            os.unlink(path)
    os.close(descriptor)


@atexit.register
def _drop_all() -> None:
    for path in list(_held):
        _drop(path)


def _forget() -> None:
    """A forked child shares the parent's locks as long as it has their descriptors; a worker may outlive the parent."""
    global _guard
    _guard = threading.Lock()
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
