"""Memory for the calls of one size in steady passes, and what such a pass tells the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ktft.lanes.ops.interface import operations
from ktft.lanes.routes import ChunkBounds, Piece

FP32, INT64 = 4, 8
_FACTOR = 0x5851F42D4C957F2D  # that of D. Knuth's MMIX generator, odd and of many bits


def call_bytes(tokens: int, top_k: int, hidden_size: int, value_bytes: int) -> int:
    """Bytes that `CallMemory` takes, without what depends on the cut, which is less."""
    return tokens * (hidden_size * (2 * value_bytes + FP32) + top_k * (2 * INT64 + 2 * FP32))


class CutRows(NamedTuple):
    """How the rows of a call are cut: the number of experts of each chunk, in the order of their numbers, and the most
    rows of a piece.
    """

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
        kept: int64 `[1]`, where gate and up are kept, as of `KeptGates`.
    """

    def __init__(self, hidden: Tensor, top_k: int, experts: int) -> None:
        (tokens, _), device = hidden.shape, hidden.device
        self.hidden, self.grad_output = torch.empty_like(hidden), torch.empty_like(hidden)
        self.index = torch.zeros(tokens, top_k, dtype=torch.int64, device=device)
        self.weights, self.grad_weights = (torch.zeros(tokens, top_k, device=device) for _ in range(2))
        self.total = torch.zeros(hidden.shape, device=device)
        self.kept = torch.zeros(1, dtype=torch.int64, device=device)
        self.told, self._experts = torch.zeros(experts + 3, dtype=torch.int64, device=device), experts
        mixed = (torch.arange(tokens * top_k, device=device) + 1) * _FACTOR
        self._factors = (mixed ^ mixed >> 29) * _FACTOR | 1
        self._rows: dict[CutRows, _SortedRows] = {}

    def pieces(self, cut: CutRows, number: int) -> list[Piece]:
        """The rows of a chunk's experts, as `begin` leaves them, in pieces that have room for all rows of the call."""
        rows, total, size = self._of(cut), self.index.numel(), cut.sizes[number]
        begins = range(0, total, cut.rows)
        ends = rows.ends[number, : len(begins) * size].view(len(begins), size)
        parts = zip(begins, ends, rows.row_route[number].split(cut.rows), strict=True)
        return [Piece(at, None, own, part, rows.route_row[number], self.index.shape[1]) for at, own, part in parts]

    def _of(self, cut: CutRows) -> _SortedRows:
        if cut not in self._rows:
            count, total, device = len(cut.sizes), self.index.numel(), self.index.device
            pieces = -(-total // cut.rows)
            sizes = pieces * self._experts, total, total
            made = (torch.zeros(count, size, dtype=torch.int32, device=device) for size in sizes)
            self._rows[cut] = _SortedRows(ChunkBounds.of(cut.sizes, device), *made)
        return self._rows[cut]

    def begin(self, cut: CutRows) -> None:
        """Sort the routes by expert, for chunks and pieces of this cut, clear the sums, and note what the host asks."""
        ops, (bounds, ends, row_route, route_row) = operations(self.hidden.device), self._of(cut)
        self.total.zero_()
        self.grad_weights.zero_()
        ops.sort_routes(self.index, self._factors, bounds, cut.rows, ends, row_route, route_row, self.told)
        ops.find_bad(self.hidden, self.told)


class _SortedRows(NamedTuple):
    """How experts are cut, and the rows of the chunks, as of `Operations.sort_routes`, which writes them."""

    bounds: ChunkBounds
    ends: Tensor
    row_route: Tensor
    route_row: Tensor
