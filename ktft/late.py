"""Writes to tensors in host memory that go on after the call which asked for them, in the order in which they were
asked for.

Whoever reads or writes such a tensor calls `settle` before. An error of a write is raised there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

_mutex = threading.Lock()
_pending: dict[int, Future[None]] = {}  # by the id of a tensor, which its write keeps alive
_pool: ThreadPoolExecutor | None = None


def write_later(writes: Sequence[tuple[Iterable[Tensor], Callable[[], Any]]]) -> None:
    """Begin writes, one after the other: each to its tensors, to which it must refer."""
    global _pool
    futures: list[Future[None]] = [Future() for _ in writes]
    with _mutex:
        _pool = _pool or ThreadPoolExecutor(1, "ktft-late")
        # One call for all: to wake the thread takes longer than a write is prepared
        _pool.submit(_write, [(future, write) for future, (_, write) in zip(futures, writes, strict=True)])
        for future, (tensors, _) in zip(futures, writes, strict=True):
            _pending.update((id(each), future) for each in tensors)


def _write(writes: Sequence[tuple[Future[None], Callable[[], Any]]]) -> None:
    for future, write in writes:
        try:
            write()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)


def writes(tensors: Iterable[Tensor]) -> bool:
    """Whether a write to one of these tensors has not ended."""
    if not _pending:
        return False
    with _mutex:
        found = [_pending.get(id(each)) for each in tensors]
    return any(future is not None and not future.done() for future in found)


def settle(tensors: Iterable[Tensor] | None = None) -> None:
    """Wait until nothing writes to these tensors any more, or to any.

    Raises:
        BaseException: what a write raised.
    """
    if not _pending:
        return
    with _mutex:
        ids = list(_pending) if tensors is None else [each for each in map(id, tensors) if each in _pending]
        waiting = list(dict.fromkeys(_pending[each] for each in ids))
    try:
        for future in waiting:
            future.result()
    finally:  # until here, another thread that asks waits as well
        with _mutex:
            for each in [each for each, future in _pending.items() if future in waiting and future.done()]:
                del _pending[each]


def _begin_anew() -> None:
    """A forked process has none of the threads; nobody there may wait for them."""
    global _pool, _mutex
    _pool, _mutex = None, threading.Lock()
    _pending.clear()


os.register_at_fork(after_in_child=_begin_anew)
