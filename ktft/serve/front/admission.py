"""When requests may compute and when the adapter may change: a swap waits for all requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from ktft.serve.front.asgi import Gone


class Busy(Exception):
    """The wait took longer than allowed."""


class Admission:
    """Counts requests in flight, and lets none in during a swap. It belongs to one event loop.

    Args:
        timeout: seconds that a request waits for a swap, that a swap waits for its turn, and that it waits for the
            requests in flight.

    Attributes:
        in_flight: requests being computed, until the last byte of their response.
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
        """A request is in flight for as long as the block lasts. It enters after any swap.

        Args:
            check: called once no swap can begin before the request is done; it may raise to refuse the request.
            disconnected: returns once the client is gone.

        Raises:
            Busy: a swap took too long.
            Gone: the client left before the swap was over.
        """
        if not self._open.is_set():
            self.waiting += 1  # until it enters; the next swap does not begin before that
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
        """Nothing is in flight, and nothing enters, for as long as the block lasts. Only one such block runs at a time.

        Raises:
            Busy: other swaps or the requests in flight took too long. Everything goes on as before.
        """
        await self._within(self._turn.acquire())
        try:
            while self.waiting:  # requests that waited for the swap before this one go first
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
