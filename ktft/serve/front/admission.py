"""When requests may compute and when an adapter may change: a change waits for the requests that it concerns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from ktft.serve.front.asgi import Gone


class Busy(Exception):
    """The wait took longer than allowed."""


class _Room:
    """The requests that one change concerns."""

    def __init__(self) -> None:
        self.in_flight = self.waiting = 0
        self.open, self.idle = asyncio.Event(), asyncio.Event()
        self.open.set()
        self.idle.set()


class Admission:
    """Counts requests in flight, room by room, and lets none into a room that is closed. It belongs to one event loop.

    Args:
        timeout: seconds that a request waits for a room to open, that a change waits for its turn, and that it waits
            for the requests in flight.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self._rooms: dict[str, _Room] = {}
        self._turn = asyncio.Lock()

    @property
    def in_flight(self) -> int:
        """Requests being computed, until the last byte of their response."""
        return sum(room.in_flight for room in self._rooms.values())

    @property
    def waiting(self) -> int:
        """Requests that wait for a change."""
        return sum(room.waiting for room in self._rooms.values())

    def in_flight_of(self, name: str) -> int:
        """Requests being computed in a room."""
        return self._rooms[name].in_flight if name in self._rooms else 0

    @asynccontextmanager
    async def entered(
        self, name: str, check: Callable[[], None], disconnected: Callable[[], Awaitable[object]]
    ) -> AsyncIterator[None]:
        """A request is in flight in a room for as long as the block lasts. It enters after any change.

        Args:
            name: of the room.
            check: called once no change can begin before the request is done; it may raise to refuse the request.
            disconnected: returns once the client is gone.

        Raises:
            Busy: a change took too long.
            Gone: the client left before the change was over.
        """
        room = self._rooms.setdefault(name, _Room())
        try:
            if not room.open.is_set():
                room.waiting += 1  # until it enters; the next change does not begin before that
                try:
                    await self._wait(room, disconnected)
                finally:
                    room.waiting -= 1
            check()
            room.in_flight += 1
            room.idle.clear()
            try:
                yield
            finally:
                room.in_flight -= 1
                if not room.in_flight:
                    room.idle.set()
        finally:
            self._leave(name, room)

    def _leave(self, name: str, room: _Room) -> None:
        """Forget a room that nobody is in: requests may give any name."""
        if room.open.is_set() and not room.in_flight and not room.waiting and self._rooms.get(name) is room:
            del self._rooms[name]

    async def _wait(self, room: _Room, disconnected: Callable[[], Awaitable[object]]) -> None:
        gone, opened = asyncio.ensure_future(disconnected()), asyncio.ensure_future(room.open.wait())
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
    async def turn(self) -> AsyncIterator[None]:
        """Changes take turns: only one such block runs at a time. Raises Busy if the one before takes too long."""
        await self._within(self._turn.acquire())
        try:
            yield
        finally:
            self._turn.release()

    @asynccontextmanager
    async def closed(self, name: str) -> AsyncIterator[None]:
        """Nothing is in flight in a room, and nothing enters, for as long as the block lasts. It is for one's turn.

        Raises:
            Busy: the requests in flight took too long. Everything goes on as before.
        """
        room = self._rooms.setdefault(name, _Room())
        try:
            while room.waiting:  # requests that waited for the change before this one go first
                await asyncio.sleep(0)
            room.open.clear()
            await self._within(room.idle.wait())
            yield
        finally:
            room.open.set()
            self._leave(name, room)

    async def _within(self, event: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self.timeout):
                await event
        except TimeoutError:
            raise Busy from None
