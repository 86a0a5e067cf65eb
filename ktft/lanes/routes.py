"""Which rows an expert has: sorts a layer's (token, slot) pairs by expert, and cuts them into pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ktft.device import device_of
from ktft.native import ELSEWHERE, ExpertLayer

PIECE_ROWS = 16384
"""The most rows of a chunk that are computed at once. This many keep a GPU busy."""
PIECE_BYTES = 384 << 20
"""The most bytes of these rows' activations."""


@dataclass(frozen=True)
class Routes:
    """The rows of one call of a layer. T tokens have k slots each; a route is token * k + slot.

    Attributes:
        top_k_index: `[T, k]` integer on the device: each route's expert; -1 if it is computed elsewhere.
        counts: `[E]`: how many routes each expert has.
    """

    top_k_index: Tensor
    counts: Sequence[int]
    _laid_out: dict[object, list[list[Piece]]] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Piece:
    """Rows of one chunk's experts that are computed at once, in the order of the experts.

    Attributes:
        begin: number of the first row among the rows of all chunks.
        counts: number of rows of each expert; None if only the device knows.
        ends: `[G]` int32 on the device: where each expert's rows end, counted from `begin`.
        row_route: `[rows]` int32: the route of each row. If only the device knows the counts, there may be more: those
            behind the last expert's end are no rows.
        route_row: `[T * k]` int32: the number of each route's row among the rows of all chunks; a number past their end
            if the route has no row.
        top_k: k.
    """

    begin: int
    counts: list[int] | None
    ends: Tensor
    row_route: Tensor
    route_row: Tensor
    top_k: int

    @property
    def rows(self) -> int:
        return self.row_route.shape[0]

    @property
    def experts(self) -> int:
        """How many experts the chunk has."""
        return self.ends.shape[0]

    def ranges(self) -> list[tuple[int, slice]]:
        """For each expert with rows its place in the chunk, and the slice of its rows. It may wait for the device."""
        ends = self.ends.tolist() if self.counts is None else list(itertools.accumulate(self.counts))
        return [(g, slice(begin, end)) for g, (begin, end) in enumerate(itertools.pairwise([0, *ends])) if begin < end]


class ChunkBounds(NamedTuple):
    """A layer's experts in the order of their numbers, cut into C chunks. Tensors are on the device.

    Attributes:
        chunk_of: int32 `[E]`: the chunk of each expert.
        firsts: int32 `[C + 1]`: each chunk's first expert, and E.
        sizes: the number of each chunk's experts.
    """

    chunk_of: Tensor
    firsts: Tensor
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: tuple[int, ...], device: torch.device) -> ChunkBounds:
        chunk_of = [number for number, size in enumerate(sizes) for _ in range(size)]
        firsts = list(itertools.accumulate(sizes, initial=0))
        on_device = [torch.tensor(each, dtype=torch.int32).to(device) for each in (chunk_of, firsts)]
        return cls(on_device[0], on_device[1], sizes)


ChunkRows = list[Piece]
"""The rows of one chunk."""


def piece_rows(hidden: int, intermediate: int) -> int:
    """How many rows' activations fit in `PIECE_BYTES`: in backward x, dy and dx; gate and up, h and dh; all bf16."""
    return max(1, min(PIECE_ROWS, PIECE_BYTES // (2 * (3 * hidden + 4 * intermediate))))


def lay_out(routes: Routes, chunks: Sequence[Sequence[int]], piece_rows: int = PIECE_ROWS) -> list[ChunkRows]:
    """The rows of each chunk's experts, in pieces of at most `piece_rows`.

    No expert may be in two chunks. A chunk whose experts have no rows has no piece. Layouts are cached in `routes`,
    because backward mostly has the same chunks as forward.
    """
    key = piece_rows, *map(tuple, chunks)
    if key not in routes._laid_out:
        routes._laid_out[key] = _lay_out(routes, chunks, piece_rows)
    return routes._laid_out[key]


def _lay_out(routes: Routes, chunks: Sequence[Sequence[int]], piece_rows: int) -> list[ChunkRows]:
    counts, device = routes.counts, routes.top_k_index.device
    cuts: list[list[tuple[int, list[int]]]] = []  # of each piece of each chunk: its first row, experts' ends
    order, total = [len(counts)] * (len(counts) + 1), 0  # each expert's place among all; -1 finds the last entry
    places = itertools.count()
    for chunk in chunks:
        for expert in chunk:
            order[expert] = next(places)
        ends = list(itertools.accumulate(counts[expert] for expert in chunk))
        rows = ends[-1] if ends else 0
        starts = range(0, rows, piece_rows)
        cuts.append([(total + s, [min(max(end - s, 0), piece_rows) for end in ends]) for s in starts])
        total += rows
    widest = max(len(order), 1)
    values = [order, *([*ends, *[0] * (widest - len(ends))] for pieces in cuts for _, ends in pieces)]
    host = torch.tensor(values, dtype=torch.int32, pin_memory=device_of(device).pin_memory)
    table = host.to(device, non_blocking=True)
    # A radix sort of few bits is short
    keys = table[0].to(torch.int16)[routes.top_k_index.reshape(-1)]
    by_row = torch.sort(keys, stable=True).indices
    numbered = torch.arange(len(by_row), dtype=torch.int32, device=device)
    route_row = torch.empty_like(numbered).scatter_(0, by_row, numbered)
    row_route = by_row.to(torch.int32)

    numbers = itertools.count(1)

    def piece(at: int, ends: list[int]) -> Piece:
        counts = [end - start for start, end in itertools.pairwise([0, *ends])]
        on_device = table[next(numbers), : len(ends)]
        top_k = routes.top_k_index.shape[1]
        return Piece(at, counts, on_device, row_route[at : at + ends[-1]], route_row, top_k)

    return [[piece(at, ends) for at, ends in pieces] for pieces in cuts]


def only(top_k_index: Tensor, experts: Sequence[int], num_experts: int) -> Tensor:
    """`[T, k]` in host memory with `ELSEWHERE` for all but these experts."""
    here = np.zeros(num_experts, dtype=bool)
    here[list(experts)] = True
    index = top_k_index.numpy()
    return torch.from_numpy(np.where(here[index], index, ELSEWHERE))


def wrong_expert(layer: ExpertLayer, expert: int) -> str:
    """The message for a routing to an expert that does not exist."""
    last = layer.num_experts - 1
    return f"{layer.name}: a token is routed to expert {expert}, but the layer's experts are 0 to {last}"


def rows_of(layer: ExpertLayer, top_k_index: Tensor) -> list[int]:
    """How many routes each expert has in `[T, k]`, in host memory. Only a layer that some routes pass
    by takes `ELSEWHERE`.

    Raises:
        ValueError: an expert number is out of range.
    """
    # numpy, because torch's threads spin for milliseconds after a large tensor, beside the thread that launches kernels
    flat = top_k_index.numpy().reshape(-1)
    if not layer.held.every_route:
        flat = flat[flat != ELSEWHERE]
    lowest, highest = (int(flat.min()), int(flat.max())) if flat.size else (0, 0)
    if lowest < 0 or highest >= layer.num_experts:
        raise ValueError(wrong_expert(layer, lowest if lowest < 0 else highest))
    counts: list[int] = np.bincount(flat, minlength=layer.num_experts).tolist()
    return counts
