"""Buffers on the device that take turns: one chunk of experts is copied while the products use the one before."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ktft.lanes.gpu.transfer import Transfer
from ktft.native.cuda import Rows, copy_on_host

ALIGNMENT = 256
"""Alignment of each matrix in a buffer, in bytes."""
LEAST_BUFFERS, MOST_BUFFERS = 2, 6
"""How many buffers take turns. Two let copies and products overlap. Six hold three layers of two chunks, which need not
be copied again where passes turn round: after the last layer's forward, and the first layer's backward.
"""


@dataclass(frozen=True)
class Source:
    """A matrix with a row for each expert: packed blocks, or a LoRA tensor `[E, ...]`.

    Attributes:
        address: where row 0 begins.
        shape, dtype: those of one row.
        locked: whether the memory is locked, so that the device can copy from it.
    """

    address: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    locked: bool = True

    @property
    def bytes(self) -> int:
        """Size of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


class Buffer:
    """One of a ring's buffers.

    Attributes:
        mirror: locked host memory of the same size, for sources that are not locked; None until it is needed.
        copied: event after which the last copy is complete.
        free: event after which the products no longer read the buffer.
        held: the places and rows that were copied last; None if they may change.
    """

    held: tuple[Sequence[RingPlace], list[int]] | None = None

    def __init__(self, transfer: Transfer) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device=transfer.device)
        self.mirror: Tensor | None = None
        self.copied, self.free = transfer.event(), transfer.event()

    def holds(self, places: Sequence[RingPlace], rows: Sequence[int]) -> bool:
        """Whether these rows were copied last, and have not changed."""
        return self.held is not None and self.held[0] is places and self.held[1] == rows


@dataclass(frozen=True)
class RingPlace:
    """Where the rows of one set of sources lie in one buffer."""

    buffer: Buffer
    views: list[Tensor]  # one `[capacity, *shape]` for each source
    locked: list[Rows]  # copies from locked sources
    pageable: list[Rows]  # and from others
    _first: dict[int, list[Tensor]] = field(default_factory=dict)

    @functools.cached_property
    def addresses(self) -> tuple[int, ...]:
        return tuple(view.data_ptr() for view in self.views)

    def first(self, count: int) -> list[Tensor]:
        if count not in self._first:
            self._first[count] = [view[:count] for view in self.views]
        return self._first[count]

    def there(self) -> bool:
        """Whether the last copy is complete."""
        return bool(self.buffer.copied.query())

    def wait(self, stream: object) -> None:
        """Make `stream` wait for the last copy."""
        self.buffer.copied.wait(stream)


def row_bytes(sources: Sequence[Source]) -> int:
    """Bytes of one expert in a buffer, without alignment."""
    return sum(source.bytes for source in sources)


class Ring:
    """Buffers of one size that take turns: the one that was used longest ago is filled next. Copies of unlocked memory
    go through a locked mirror of the buffer.

    `frozen` says that the sources never change, so a buffer that already holds the rows is not filled again.
    """

    def __init__(self, transfer: Transfer, *, frozen: bool = False) -> None:
        self._transfer, self._frozen = transfer, frozen
        self._buffers = [Buffer(transfer) for _ in range(LEAST_BUFFERS)]
        self._turns = list(range(LEAST_BUFFERS))  # the buffers' numbers, that of the next one first

    @property
    def bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    @staticmethod
    def size(sources: Sequence[Source], capacity: int) -> int:
        """Bytes of one buffer for `capacity` rows of each source."""
        return sum(aligned(source.bytes * capacity) for source in sources)

    def reserve(self, size: int, count: int = LEAST_BUFFERS) -> bool:
        """Make the buffers at least so large, and at least so many; returns whether they moved.

        Raises:
            torch.OutOfMemoryError: the device has no room.
        """
        now, new = self._buffers[0].memory.nbytes, range(len(self._buffers), count)
        if size <= now and not new:
            return False
        self._transfer.synchronize()
        for buffer in self._buffers:
            buffer.free.synchronize()
            buffer.memory, buffer.mirror, buffer.held = buffer.memory.new_empty(0), None, None
        self._turns += new
        self._buffers += [Buffer(self._transfer) for _ in new]
        for buffer in self._buffers:
            buffer.memory = torch.empty(max(size, now), dtype=torch.uint8, device=self._transfer.device)
            self._transfer.keep([buffer.memory], self._transfer.into)
            # Products that still run may use this memory, which torch has just reused: copies must wait for them
            buffer.free.record(self._transfer.compute())
        return True

    def places(self, sources: Sequence[Source], capacity: int) -> list[RingPlace]:
        """Where the sources' rows lie in each buffer. Call `reserve` before, so that the buffers are large enough."""
        return [self._place(buffer, sources, capacity) for buffer in self._buffers]

    @staticmethod
    def _place(buffer: Buffer, sources: Sequence[Source], capacity: int) -> RingPlace:
        views, rows, at = [], {True: [], False: []}, 0  # type: list[Tensor], dict[bool, list[Rows]], int
        for source in sources:
            size = source.bytes * capacity
            view = buffer.memory[at : at + size].view(source.dtype).view(capacity, *source.shape)
            views.append(view)
            rows[source.locked].append(Rows(source.address, view.data_ptr(), source.bytes))
            at += aligned(size)
        return RingPlace(buffer, views, rows[True], rows[False])

    def fill(self, places: Sequence[RingPlace], rows: Sequence[int]) -> RingPlace:
        """Begin to copy these rows into the next buffer, as soon as the products no longer read it."""
        there = next((number for number in self._turns if self._buffers[number].holds(places, rows)), None)
        number = self._turns[0] if there is None else there
        self._turns.remove(number)
        self._turns.append(number)
        place, buffer = places[number], self._buffers[number]
        if there is not None:
            return place
        buffer.held = None
        buffer.free.wait(self._transfer.into)
        self._transfer.copy_in(rows, place.locked)
        if place.pageable:
            self._through_mirror(place, rows)
        buffer.copied.record(self._transfer.into)
        if self._frozen:
            buffer.held = places, list(rows)
        return place

    def turn_back(self, count: int) -> None:
        """Give back the buffers of the last `count` fillings, which turned out not to be needed."""
        at = len(self._turns) - count
        self._turns = [*self._turns[at:], *self._turns[:at]]

    def _through_mirror(self, place: RingPlace, rows: Sequence[int]) -> None:
        buffer = place.buffer
        if buffer.mirror is None:
            size, pinned = buffer.memory.nbytes, self._transfer.driver is not None
            with torch.inference_mode(False):
                buffer.mirror = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        buffer.copied.synchronize()  # until then the copy before this one reads the mirror
        shift = buffer.mirror.data_ptr() - buffer.memory.data_ptr()
        mirrored = [Rows(m.matrix, m.batch + shift, m.bytes, m.matrix_stride) for m in place.pageable]
        copy_on_host(rows, mirrored, gather=True)
        self._transfer.copy_in(range(len(rows)), [Rows(m.batch + shift, m.batch, m.bytes) for m in place.pageable])


def aligned(size: int) -> int:
    """`size` rounded up, so that what follows in a buffer is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT
