"""Who may compute, and when the adapter may change: requests in flight are counted, a swap waits for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager


class Busy(Exception):
    """Waited for as long as allowed."""


class Gone(Exception):
    """The client disconnected while it waited."""


class Admission:
    """Counts requests in flight, and closes for a swap. For one event loop.

    Args:
        timeout: seconds that a request waits for a swap, a swap for its turn, and a swap for the requests in flight.

    Attributes:
        in_flight: requests that are computed, until the last byte of their response.
        waiting: requests that wait for a swap.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.in_flight = 0
        self.waiting = 0
        self._open, self._idle, self._turn = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._open.set()
        self._idle.set()

    @asynccontextmanager
    async def entered(
        self, check: Callable[[], None], disconnected: Callable[[], Awaitable[object]]
    ) -> AsyncIterator[None]:
        """Be in flight, after any swap.

        Args:
            check: called when nothing changes any more until the request is done; may raise to refuse it.
            disconnected: returns once the client is gone.

        Raises:
            Busy: a swap took too long.
            Gone: the client did not wait for it.
        """
        if not self._open.is_set():
            self.waiting += 1  # until it enters: the next swap does not close before
            try:
                await self._wait(disconnected)
            finally:
                self.waiting -= 1
        check()
        self.in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()

    async def _wait(self, disconnected: Callable[[], Awaitable[object]]) -> None:
        gone, opened = asyncio.ensure_future(disconnected()), asyncio.ensure_future(self._open.wait())
        try:
            await asyncio.wait({gone, opened}, timeout=self.timeout, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise Gone
            if not opened.done():
                raise Busy
        finally:
            gone.cancel()
            opened.cancel()
            await asyncio.wait({gone, opened})

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Nothing is in flight and nothing enters. One at a time.

        Raises:
            Busy: others' swaps or the requests in flight took too long. All goes on as before.
        """
        await self._within(self._turn.acquire())
        try:
            while self.waiting:  # for the swap before this one: they were first
                await asyncio.sleep(0)
            self._open.clear()
            await self._within(self._idle.wait())
            yield
        finally:
            self._open.set()
            self._turn.release()

    async def _within(self, event: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self.timeout):
                await event
        except TimeoutError:
            raise Busy from None
