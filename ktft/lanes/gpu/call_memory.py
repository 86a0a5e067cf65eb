"""Memory for the calls of one size in steady passes, and what such a pass tells the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ktft.lanes.gpu.chunks import Chunk
from ktft.lanes.ops.interface import operations
from ktft.lanes.routes import ExpertPlaces, Piece

FP32, INT32, INT64 = 4, 4, 8
_FACTOR = 0x5851F42D4C957F2D  # that of D. Knuth's MMIX generator, odd and of many bits


def call_bytes(tokens: int, top_k: int, hidden_size: int, value_bytes: int) -> int:
    """Bytes that `CallMemory` takes, without what depends on the cut, which is less."""
    return tokens * (hidden_size * (2 * value_bytes + FP32) + top_k * (2 * INT64 + 2 * FP32))


class CutRows(NamedTuple):
    """How the rows of a call are cut: the number of experts of each chunk, and the most rows of a piece."""

    sizes: tuple[int, ...]
    rows: int


class PassReport(NamedTuple):
    """What a pass tells the host. Nobody waits for it: it is looked at once a step.

    Attributes:
        counts: how many rows each expert has.
        stray: the number of an expert that does not exist, but that a token is routed to; 0 if there is none.
        routing: another number, most likely, if a token goes to another expert.
        bad_token: the first token whose hidden states hold NaN or Inf; -1 if none does.
    """

    counts: list[int]
    stray: int
    routing: int
    bad_token: int

    @classmethod
    def of(cls, found: list[int]) -> PassReport:
        """From the numbers of `CallMemory.told`."""
        return cls(found[:-3], *found[-3:])


class CallMemory:
    """What recordings of calls of one size read and write. T tokens have k slots each, R in all, for E experts.

    Attributes:
        hidden, grad_output: `[T, H]`.
        index: `[T, k]` int64; weights: `[T, k]` fp32.
        total, grad_weights: fp32 `[T, H]` and `[T, k]`: the sums that a pass makes.
        told: `[E + 3]` int64, what makes a `PassReport`.
    """

    def __init__(self, hidden: Tensor, top_k: int, experts: int) -> None:
        (tokens, _), device = hidden.shape, hidden.device
        self.hidden, self.grad_output = torch.empty_like(hidden), torch.empty_like(hidden)
        self.index = torch.zeros(tokens, top_k, dtype=torch.int64, device=device)
        self.weights, self.grad_weights = (torch.zeros(tokens, top_k, device=device) for _ in range(2))
        self.total = torch.zeros(hidden.shape, device=device)
        self.told = torch.zeros(experts + 3, dtype=torch.int64, device=device)
        mixed = (torch.arange(tokens * top_k, device=device) + 1) * _FACTOR
        self._factors = (mixed ^ mixed >> 29) * _FACTOR | 1
        # Each expert's place among those of all chunks, and the expert of each place
        self._order = torch.zeros(experts, dtype=torch.int16, device=device)
        self._experts_of = torch.zeros(experts, dtype=torch.int32, device=device)
        self._rows: dict[CutRows, _SortedRows] = {}
        self._orders: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._ordered: tuple[int, ...] = ()

    def arrange(self, chunks: Sequence[Chunk]) -> tuple[int, ...]:
        """Take the experts in this order. Returns the number of each chunk's."""
        experts = tuple(itertools.chain.from_iterable(chunk.experts for chunk in chunks))
        if experts not in self._orders:
            of_place = torch.tensor(experts, dtype=torch.int32)
            place = of_place.argsort().to(torch.int16)
            self._orders[experts] = place.to(self._order.device), of_place.to(self._order.device)
        if experts != self._ordered:
            for memory, values in zip((self._order, self._experts_of), self._orders[experts], strict=True):
                memory.copy_(values)
            self._ordered = experts
        return tuple(len(chunk.experts) for chunk in chunks)

    def chunks(self, cut: CutRows) -> list[list[Piece]]:
        """The rows of each chunk's experts, as `begin` leaves them."""
        return self._of(cut).chunks

    def _of(self, cut: CutRows) -> _SortedRows:
        if cut not in self._rows:
            self._rows[cut] = _SortedRows(cut, self.index)
        return self._rows[cut]

    def begin(self, cut: CutRows) -> None:
        """Sort the routes by expert, for chunks and pieces of this cut, clear the sums, and note what the host asks."""
        rows, ops = self._of(cut), operations(self.hidden.device)
        self.total.zero_()
        self.grad_weights.zero_()
        places = ExpertPlaces(self._order, self._experts_of, rows.chunk_of, rows.firsts, cut.sizes)
        ops.sort_routes(
            self.index, self._factors, places, cut.rows, rows.ends, rows.row_route, rows.route_row, self.told
        )
        ops.find_bad(self.hidden, self.told)


class _SortedRows:
    """The rows of each chunk's experts, in P pieces that have room for all R rows of a call. The attributes are as of
    `Operations.sort_routes`, which writes them.
    """

    def __init__(self, cut: CutRows, index: Tensor) -> None:
        (rows, top_k), device = (index.numel(), index.shape[1]), index.device
        count, begins = len(cut.sizes), range(0, rows, cut.rows)
        firsts = list(itertools.accumulate(cut.sizes, initial=0))
        chunk_of = [chunk for chunk, size in enumerate(cut.sizes) for _ in range(size)]
        self.firsts, self.chunk_of = (
            torch.tensor(each, dtype=torch.int32, device=device) for each in (firsts, chunk_of)
        )
        self.ends = torch.zeros(len(begins) * firsts[-1], dtype=torch.int32, device=device)
        self.row_route, self.route_row = (torch.zeros(count, rows, dtype=torch.int32, device=device) for _ in range(2))
        self.chunks = []
        for ends, row_route, route_row in zip(
            self.ends.split([len(begins) * size for size in cut.sizes]), self.row_route, self.route_row, strict=True
        ):
            parts = zip(begins, ends.view(len(begins), -1), row_route.split(cut.rows), strict=True)
            self.chunks.append([Piece(begin, None, own, part, route_row, top_k) for begin, own, part in parts])
