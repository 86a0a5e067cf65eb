"""Routes sorted by expert, and what the host asks of them, in two Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.ops.triton_launch import power_of_2, short
from ktft.lanes.routes import ChunkBounds

BLOCK, COLS = 2048, 1024


@short
@triton.jit(do_not_specialize=("routes", "experts", "pieces", "piece_rows"))
def _sort(
    index, factors, chunk_of, firsts, ends, row_route, route_row, told, routes, experts, pieces, piece_rows,
    BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """One program for each expert. All of them read all routes, so none waits for another."""
    mine = tl.program_id(0)
    chunk = tl.load(chunk_of + mine)
    first, end = tl.load(firsts + chunk), tl.load(firsts + chunk + 1)
    before, own = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, routes, BLOCK):
        route = begin + tl.arange(0, BLOCK)
        expert = tl.load(index + route, mask=route < routes, other=-1)
        before += ((expert >= first) & (expert < mine)).to(tl.int32)
        own += (expert == mine).to(tl.int32)
    row, count = tl.sum(before, 0), tl.sum(own, 0)
    tl.store(told + mine, count.to(tl.int64))
    piece = tl.arange(0, PIECES)
    within = tl.minimum(tl.maximum(row + count - piece * piece_rows, 0), piece_rows)
    ends += chunk.to(tl.int64) * pieces * experts + mine - first
    tl.store(ends + piece * (end - first), within, mask=piece < pieces)
    row_route += chunk.to(tl.int64) * routes
    route_row += chunk.to(tl.int64) * routes
    for begin in range(0, routes, BLOCK):
        route = begin + tl.arange(0, BLOCK)
        expert = tl.load(index + route, mask=route < routes, other=-1)
        here = expert == mine
        number = row + tl.cumsum(here.to(tl.int32), 0) - 1
        tl.store(row_route + number, route, mask=here)
        tl.store(route_row + route, number, mask=here)
        row += tl.sum(here.to(tl.int32), 0)
    if mine == 0:
        lowest, highest = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
        total = tl.zeros((BLOCK,), tl.int64)
        for begin in range(0, routes, BLOCK):
            route = begin + tl.arange(0, BLOCK)
            expert = tl.load(index + route, mask=route < routes, other=0)
            lowest, highest = tl.minimum(lowest, expert), tl.maximum(highest, expert)
            total += expert * tl.load(factors + route, mask=route < routes, other=0)
        least, most = tl.min(lowest, 0), tl.max(highest, 0)
        tl.store(told + experts, tl.where(least < 0, least, tl.where(most < experts, 0, most)))
        tl.store(told + experts + 1, tl.sum(total, 0))
        tl.store(told + experts + 2, -1)


@short
@triton.jit
def _find_bad(hidden, told, cols, COLS: tl.constexpr):
    token = tl.program_id(0)
    bad = tl.zeros((COLS,), tl.int32)
    for begin in range(0, cols, COLS):
        col = begin + tl.arange(0, COLS)
        value = tl.load(hidden + token.to(tl.int64) * cols + col, mask=col < cols, other=0).to(tl.float32)
        bad |= (value - value != 0).to(tl.int32)  # of NaN and Inf the difference is NaN, of all else 0
    if tl.max(bad, 0) > 0:  # as an unsigned number, -1 is the largest
        tl.atomic_min(told.to(tl.pointer_type(tl.uint64), bitcast=True), token.to(tl.uint64))


def sort_routes(
    index: Tensor, factors: Tensor, bounds: ChunkBounds, piece_rows: int, ends: Tensor, row_route: Tensor,
    route_row: Tensor, told: Tensor,
) -> None:  # fmt: skip
    routes, experts = index.numel(), len(bounds.chunk_of)
    pieces = ends.shape[1] // experts
    route_row.fill_(routes)
    _sort[(experts,)](
        index, factors, bounds.chunk_of, bounds.firsts, ends, row_route, route_row, told, routes, experts, pieces,
        piece_rows, BLOCK=BLOCK, PIECES=power_of_2(pieces), num_warps=8,
    )  # fmt: skip


def find_bad(hidden: Tensor, told: Tensor) -> None:
    _find_bad[(len(hidden),)](hidden, told[-1:], hidden.shape[1], COLS=COLS)
