"""Each rank tells the others that it lives, or how it failed, so that none waits forever for one that is gone.

A rank that dies leaves the others waiting in a collective call, some for hours. So a thread of each rank writes to the
store by which the ranks found each other, every `EVERY` seconds, and reads what the others wrote. A rank is gone if it
said that it failed, if its process has ended on this machine, or if it was silent for `SILENT` seconds, of which those
do not count that this process itself spent stopped: a job that is continued, or a machine, finds all others silent.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from ktft.ranks.group import started, store
from ktft.ranks.launch import Launch

logger = logging.getLogger("ktft")

EVERY = 1.0
SILENT = 30.0
"""Seconds. Machines under load pause for seconds, and torchrun kills a process that does not end after 30 more."""
GRACE = 5.0
"""Seconds that the main thread gets to end by itself, since an exception says more."""


class Store(Protocol):
    """What torch.distributed's stores have. No call waits for a key."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...


@dataclass(frozen=True)
class _Life:
    """What a rank writes: its machine, its process there, and a count that grows."""

    host: str
    space: str  # its namespaces: process numbers mean the same within one, and a cut network cuts none of it off
    process: int
    count: int

    @classmethod
    def read(cls, text: str) -> _Life:
        host, space, process, count = text.split("|")
        return cls(host, space, int(process), int(count))

    def __str__(self) -> str:
        return f"{self.host}|{self.space}|{self.process}|{self.count}"


class Watch:
    """Tells the other ranks of this one and watches them, from `start` to `stop`.

    Args:
        store: the ranks' common store; used by one thread only.
        end: ends this process at once; by default with exit status 1.

    Attributes:
        found: what is known of a rank that is gone, for a person; None while all live.
    """

    def __init__(self, launch: Launch, store: Store, end: Callable[[], None] | None = None) -> None:
        self._launch, self._store = launch, store
        self._end = end or (lambda: os._exit(1))
        self.found: str | None = None
        self._failure: str | None = None
        self._told = threading.Event()
        self._stopping = threading.Event()
        self._heard: dict[int, tuple[_Life, float]] = {}
        self._awake = self._reached = 0.0  # seconds in which this process ran
        self._talk = threading.Thread(target=self._talking, name="ktft-watch", daemon=True)
        self._guard = threading.Thread(target=self._guarding, name="ktft-watch-guard", daemon=True)

    def start(self) -> None:
        self._talk.start()
        self._guard.start()

    def stop(self) -> None:
        """Say that this rank ends as it should."""
        self._stopping.set()
        self._talk.join(5 * EVERY)

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks why this one fails. Returns once they have read it, or after some seconds."""
        self._failure = f"{type(error).__name__}: {error}"
        self._told.wait(6 * EVERY)

    def wait_for_reason(self, seconds: float = 2 * EVERY + GRACE) -> str | None:
        """What is known of a rank that is gone, waiting for it a while, since a broken connection comes first."""
        until = time.monotonic() + seconds
        while self.found is None and time.monotonic() < until:
            time.sleep(0.1)
        return self.found

    # --- threads ------------------------------------------------------------------------------------------------------

    def _talking(self) -> None:
        count = 0
        space = " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
        while True:
            life, ended = _Life(socket.gethostname(), space, os.getpid(), count), self._stopping.is_set()
            try:
                self._store.set(f"life/{self._launch.rank}", "ended" if ended else str(life))
                if self._failure is not None:
                    self._store.set(f"failure/{self._launch.rank}", f"{life.host}|{self._failure}")
                    self._wait_until_heard()
                    self._told.set()
                if ended or self._failure is not None:
                    return
                self._look(life)
                self._reached = self._awake
            except (RuntimeError, ValueError, OSError):
                logger.debug("the ranks' store cannot be reached", exc_info=True)
            count += 1
            self._stopping.wait(EVERY)

    def _wait_until_heard(self) -> None:
        """Torchrun ends the others as soon as this process has ended, and they could not say why they end."""
        own, until = self._launch.rank, time.monotonic() + 4 * EVERY
        missing = [rank for rank in range(self._launch.ranks) if rank != own]
        while missing and time.monotonic() < until:
            time.sleep(EVERY / 10)
            missing = [
                rank
                for rank in missing
                if not any(self._store.check([key]) for key in (f"heard/{own}/{rank}", f"failure/{rank}"))
            ]

    def _look(self, own: _Life) -> None:
        for rank in range(self._launch.ranks):
            key = f"failure/{rank}"
            if rank == self._launch.rank:
                continue
            if self._store.check([key]):
                host, _, failure = self._store.get(key).decode().partition("|")
                self._gone(rank, host, f"failed: {failure}")
                self._store.set(f"heard/{rank}/{self._launch.rank}", "1")
            elif self._store.check([f"life/{rank}"]):
                self._hear(rank, self._store.get(f"life/{rank}").decode(), own)

    def _hear(self, rank: int, text: str, own: _Life) -> None:
        now = self._awake
        if text == "ended":
            self._heard.pop(rank, None)
            return
        life, (before, since) = _Life.read(text), self._heard.get(rank, (None, now))
        if life != before:
            self._heard[rank] = life, now
            return
        near = (life.host, life.space) == (own.host, own.space)
        if near and not os.path.exists(f"/proc/{life.process}"):
            self._gone(rank, life.host, f"is gone: its process {life.process} has ended without a word. {_KILLED}")
        elif now - since > SILENT:
            self._gone(rank, life.host, f"has been silent for {now - since:.0f} s: it hangs, or its machine is cut off")
            if near:  # torchrun would wait for it for another half minute
                os.kill(life.process, signal.SIGKILL)

    def _gone(self, rank: int, host: str, what: str) -> None:
        if self.found is None:
            self._find(f"rank {rank} on {host} {what}")

    def _find(self, what: str) -> None:
        logger.error("%s ends because %s", self._launch.name, what)
        sys.stderr.flush()
        self.found = what

    def _guarding(self) -> None:
        woken = time.monotonic()
        while self.found is None and not self._stopping.wait(EVERY / 2):
            slept, woken = woken, time.monotonic()
            self._awake += min(woken - slept, EVERY)
            if (silence := self._awake - self._reached) > SILENT and self._failure is None:
                self._find(
                    f"the other ranks could not be reached for {silence:.0f} s: the network is cut, or the process "
                    "that started rank 0 is gone"
                )
        if self.found is None or self._stopping.wait(GRACE):
            return
        self._end()


_KILLED = "Its own output may say why; the kernel's log does if it killed the process for lack of memory (dmesg)"


def begin() -> Watch | None:
    """This process's watch, which starts once the ranks have found each other and ends with the process; None before.

    An exception that ends the process is told to the others.
    """
    return _begin() if started() else None


@functools.cache
def _begin() -> Watch | None:
    if (found := store()) is None:
        return None
    watch, own, before = Watch(Launch.of_environment(), found), os.getpid(), sys.excepthook
    watch.start()

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        if os.getpid() == own:
            watch.fail(error)

    sys.excepthook = tell
    atexit.register(lambda: watch.stop() if os.getpid() == own else None)
    return watch


@contextmanager
def explained() -> Iterator[None]:
    """A block in which an error that follows from another rank's end says which one, and why.

    Raises:
        RuntimeError: another rank is gone.
    """
    watch = begin()
    try:
        yield
    except RuntimeError as error:
        broken = watch is not None and any(sign in str(error) for sign in _BROKEN)
        if not broken or watch is None or (reason := watch.wait_for_reason()) is None:
            raise
        raise RuntimeError(f"this process cannot go on because {reason}") from error


_BROKEN = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "socket", "Socket")
"""Words in the errors of torch.distributed."""
