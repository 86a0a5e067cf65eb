"""Allows one writer per folder, by a lock file that names its holder. The lock of a process that died is taken over.

The lock is the kernel's `flock` on that file; network file systems forward it to their server. On a file system without
locks, the file's content still shows whether its holder runs on this machine.
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
"""The name of the lock file in a locked folder. Uploads to a hub skip names with this beginning."""

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
        what: description of what the process does there.
        host, boot, pid, started: the process's identity. `boot` is Linux's boot id and `started` is in the kernel's
            clock ticks since that boot, so neither a reused process id nor a changed clock can mislead.
        since: local time at which the process took the lock, for people to read.
    """

    what: str
    host: str
    boot: str
    pid: int
    started: int
    since: str

    @classmethod
    def here(cls, what: str) -> Holder:
        """A holder that stands for this process."""
        since = datetime.now().astimezone().isoformat(" ", "seconds")
        return cls(what, socket.gethostname(), _boot(), os.getpid(), _started(os.getpid()), since)

    @classmethod
    def read(cls, content: bytes) -> Holder | None:
        """Parse a lock file's content; None if it is empty or damaged."""
        try:
            found = cls(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        return found if all(type(v) is t for v, t in zip(asdict(found).values(), _TYPES, strict=True)) else None

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} ({self.what} since {self.since})"

    @property
    def is_here(self) -> bool:
        """Whether the process is on this machine and was started since the machine's last boot."""
        return (self.host, self.boot) == (socket.gethostname(), _boot())

    @property
    def runs(self) -> bool:
        """Whether the process is known to run. A process on another machine is not."""
        return self.is_here and self.started == _started(self.pid)


_TYPES = (str, str, str, int, int, str)


def _boot() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _started(pid: int) -> int:
    """The start of a process, in clock ticks since the machine booted; 0 if the process has ended."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return 0 if state in (b"Z", b"X") else int(fields[18])
    except (OSError, ValueError, IndexError):
        return 0


# --- holding ----------------------------------------------------------------------------------------------------------

_guard = threading.Lock()
_held: dict[str, list[int]] = {}  # lock file -> [its descriptor, number of times this process holds it]


@contextmanager
def locked(directory: Path, what: str, file: Path | None = None) -> Iterator[bool]:
    """Lock `directory` against writers in other processes; it is made if missing. A process may hold a lock repeatedly.

    Args:
        what: description of what this process does there, for the message that other processes get.
        file: the lock file; by default `LOCK` in the directory.

    Yields:
        True if this process did not hold the lock before.

    Raises:
        ValueError: another process holds the lock; the message names that process.
        OSError: the directory is not writable.
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
    """Take the lock and return the descriptor that holds it."""
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
    except OSError as error:  # for example a full disk: an empty lock file would not name its holder
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
    """Log whose lock is taken over.

    Raises:
        ValueError: the previous holder still runs, so locks have no effect on this file system.
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
    """Release the parent's locks in a forked child.

    The child shares them as long as it has their descriptors open, and a worker may outlive its parent.
    """
    global _guard
    _guard = threading.Lock()
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)
