"""Which rows an expert has: a layer's (token, slot) pairs sorted by expert, and cut into what is computed at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE_ROWS = 16384
"""Rows of one chunk that are computed at once, at most: so many keep a GPU busy."""
PIECE_BYTES = 384 << 20
"""Of the activations of these rows."""


@dataclass(frozen=True)
class Routes:
    """The rows of one call of a layer: T tokens with k slots each, route = token * k + slot.

    Attributes:
        row_route: `[T * k]` int32 on the device: the routes in the order of their experts, within one in their own
            order. Those of no expert (index -1) come last.
        begin: `[E + 1]`: expert e has rows begin[e] to begin[e + 1].
        top_k: k.
    """

    row_route: Tensor
    begin: list[int]
    top_k: int


@dataclass(frozen=True)
class Piece:
    """Rows of one chunk's experts, in their order, that are computed at once.

    Attributes:
        begin: number of the first one among the rows of all chunks.
        counts: rows of each expert.
        ends: `[G]` int32 on the device: where each expert's rows end, counted from `begin`.
        row_route: `[rows]` int32: their routes.
        route_row: `[T * k]` int32: each route's number among the rows of all chunks, -1 where it has none.
        top_k: k.
    """

    begin: int
    counts: list[int]
    ends: Tensor
    row_route: Tensor
    route_row: Tensor
    top_k: int

    @property
    def rows(self) -> int:
        """Their number."""
        return self.row_route.shape[0]

    def ranges(self) -> list[tuple[int, slice]]:
        """The place of each expert that has rows, and these."""
        ends = list(itertools.accumulate(self.counts))
        return [(g, slice(end - n, end)) for g, (n, end) in enumerate(zip(self.counts, ends, strict=True)) if n]


ChunkRows = list[Piece]
"""All rows of one chunk."""


def to_device(values: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int32 numbers on `device`, without waiting for it."""
    host = torch.tensor(values, dtype=torch.int32, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def route(top_k_index: Tensor, counts: Sequence[int]) -> Routes:
    """Sort the routes by expert, on their device and without waiting for it.

    Args:
        top_k_index: `[T, k]` integer expert numbers; -1 where a route is computed elsewhere.
        counts: `[E]`: how often each expert is in it.
    """
    flat = top_k_index.reshape(-1)
    keys = torch.where(flat < 0, len(counts), flat).to(torch.int16)  # few bits: a short radix sort
    order = torch.sort(keys, stable=True).indices.to(torch.int32)
    return Routes(order, [0, *itertools.accumulate(counts)], top_k_index.shape[1])


def piece_rows(hidden: int, intermediate: int) -> int:
    """Rows whose activations fit in `PIECE_BYTES`: in backward x, dy and dx; gate and up, h and dh; all bf16."""
    return max(1, min(PIECE_ROWS, PIECE_BYTES // (2 * (3 * hidden + 4 * intermediate))))


def lay_out(routes: Routes, chunks: Sequence[Sequence[int]], piece_rows: int = PIECE_ROWS) -> list[ChunkRows]:
    """The rows of the chunks' experts, one chunk after the other, in pieces of at most `piece_rows`.

    Experts of all chunks together are different ones. A chunk whose experts have no rows has no piece.
    """
    begin, device = routes.begin, routes.row_route.device
    parts = [routes.row_route[begin[e] : begin[e + 1]] for chunk in chunks for e in chunk if begin[e] < begin[e + 1]]
    row_route = torch.cat(parts) if parts else routes.row_route[:0]
    total = row_route.shape[0]
    route_row = torch.full((routes.row_route.shape[0],), -1, dtype=torch.int32, device=device)
    route_row[row_route.long()] = torch.arange(total, dtype=torch.int32, device=device)

    cuts: list[list[tuple[int, list[int]]]] = []  # of each chunk: a piece's first row, the experts' ends in it
    first, widest = 0, max((len(chunk) for chunk in chunks), default=0)
    for chunk in chunks:
        ends = list(itertools.accumulate(begin[e + 1] - begin[e] for e in chunk))
        rows = ends[-1] if ends else 0
        starts = range(0, rows, piece_rows)
        cuts.append([(first + s, [min(max(end - s, 0), piece_rows) for end in ends]) for s in starts])
        first += rows
    table = to_device([[*ends, *[0] * (widest - len(ends))] for pieces in cuts for _, ends in pieces] or [[]], device)

    numbers = itertools.count()

    def piece(at: int, ends: list[int]) -> Piece:
        counts = [end - start for start, end in itertools.pairwise([0, *ends])]
        on_device = table[next(numbers), : len(ends)]
        return Piece(at, counts, on_device, row_route[at : at + ends[-1]], route_row, routes.top_k)

    return [[piece(at, ends) for at, ends in pieces] for pieces in cuts]
