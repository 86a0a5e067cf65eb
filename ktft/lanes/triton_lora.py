"""Low-rank products of rows grouped by expert, with dropout's masks, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.dropout import Dropout, signed
from ktft.lanes.routes import Piece

ROWS, RANKS, COLS = 32, 64, 128
# What changes from call to call must not make new kernels
UNSPECIALIZED = {
    "do_not_specialize": ("experts", "low_key", "high_key", "threshold", "factor"),
    "do_not_specialize_on_alignment": ("ends", "routes"),
}


@triton.jit
def _tile(ends, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert and the rows [first, last) of this program's tile: of an expert's rows, some ROWS."""
    g = tl.arange(0, EXPERTS)
    end = tl.load(ends + g, mask=g < experts, other=0)
    begin = tl.load(ends + g - 1, mask=(g > 0) & (g < experts), other=0)
    tiles = tl.where(g < experts, (end - begin + ROWS - 1) // ROWS, 0)
    upto = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    mine = g == expert
    first = tl.sum(tl.where(mine, begin + (tile - upto + tiles) * ROWS, 0), 0)
    return expert.to(tl.int64), first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _stays(routes, row, here, col, low_key, high_key, threshold):
    """`dropout.stays` for rows and columns."""
    route = tl.load(routes + row, mask=here, other=0)
    stream = high_key.to(tl.uint32, bitcast=True).to(tl.uint64) << 32 | low_key.to(tl.uint32, bitcast=True).to(
        tl.uint64
    )
    key = route.to(tl.uint64) + stream
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    key = key ^ (key >> 31)
    z = (col.to(tl.uint32) * 0x9E3779B9)[None, :] ^ key.to(tl.uint32)[:, None]
    z = (z ^ (z >> 16)) * 0x7FEB352D
    z = (z ^ (z >> 15)) * 0x846CA68B
    z = z ^ (z >> 16)
    return (z ^ (key >> 32).to(tl.uint32)[:, None]) >= threshold.to(tl.uint32, bitcast=True)


@triton.jit(**UNSPECIALIZED)
def _low_rank(
    x, x_row, a, a_expert, a_part, out, out_row, out_part, ends, routes, experts, cols, ranks,
    low_key, high_key, threshold,
    DROPS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    expert, first, last = _tile(ends, experts, EXPERTS, ROWS)
    if first >= last:
        return
    row = first + tl.arange(0, ROWS)
    here = row < last
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    from_x = x + row.to(tl.int64)[:, None] * x_row
    from_a = a + expert * a_expert + rank[:, None] * cols
    sums = tl.zeros((ROWS, RANKS), tl.float32)
    for c in range(0, cols, COLS):
        col = c + tl.arange(0, COLS)
        value = tl.load(from_x + col[None, :], mask=here[:, None] & (col < cols)[None, :], other=0)
        if DROPS:
            value = tl.where(_stays(routes, row, here, col, low_key, high_key, threshold), value, 0)
        inside = (rank < ranks)[:, None] & (col < cols)[None, :]
        sums = tl.dot(value, tl.trans(tl.load(from_a + col[None, :], mask=inside, other=0)), sums)
        sums = tl.dot(value, tl.trans(tl.load(from_a + a_part + col[None, :], mask=inside, other=0)), sums)
    to = out + row.to(tl.int64)[:, None] * out_row + rank[None, :]
    inside = here[:, None] & (rank < ranks)[None, :]
    tl.store(to, sums.to(tl.bfloat16), mask=inside)
    tl.store(to + out_part, sums.to(tl.bfloat16), mask=inside)


@triton.jit(**UNSPECIALIZED)
def _add_low_rank(
    low, low_row, low_part, a, a_expert, a_part, out, out_row, ends, routes, experts, cols, ranks,
    low_key, high_key, threshold,
    DROPS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    expert, first, last = _tile(ends, experts, EXPERTS, ROWS)
    if first >= last:
        return
    row = first + tl.arange(0, ROWS)
    here = row < last
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    sums = tl.zeros((ROWS, COLS), tl.float32)
    for r in range(0, ranks, RANKS):
        rank = r + tl.arange(0, RANKS)
        from_low = low + row.to(tl.int64)[:, None] * low_row + rank[None, :]
        inside = here[:, None] & (rank < ranks)[None, :]
        value = tl.load(from_low, mask=inside, other=0).to(tl.float32)
        value = (value + tl.load(from_low + low_part, mask=inside, other=0).to(tl.float32)).to(tl.bfloat16)
        from_a = a + expert * a_expert + rank[:, None] * cols + col[None, :]
        inside = (rank < ranks)[:, None] & (col < cols)[None, :]
        sums = tl.dot(value, tl.load(from_a, mask=inside, other=0), sums)
        sums = tl.dot(value, tl.load(from_a + a_part, mask=inside, other=0), sums)
    if DROPS:
        sums = tl.where(_stays(routes, row, here, col, low_key, high_key, threshold), sums, 0)
    to = out + row.to(tl.int64)[:, None] * out_row + col[None, :]
    inside = here[:, None] & (col < cols)[None, :]
    tl.store(to, (tl.load(to, mask=inside, other=0).to(tl.float32) + sums).to(tl.bfloat16), mask=inside)


@triton.jit(**UNSPECIALIZED)
def _gradient(
    low, low_row, low_part, wide, wide_row, out, out_expert, out_rank, out_col, ends, routes, weights,
    scale, scale_expert, cols, ranks, low_key, high_key, threshold, factor,
    PARTS: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, DROPS: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    last = tl.load(ends + expert)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if first >= last:
        return
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    rank = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
    sums = tl.zeros((RANKS, COLS), tl.float32)
    for begin in range(first, last, ROWS):
        row = begin + tl.arange(0, ROWS)
        here = row < last
        from_low = low + row.to(tl.int64)[:, None] * low_row + rank[None, :]
        inside = here[:, None] & (rank < ranks)[None, :]
        value = tl.load(from_low, mask=inside, other=0).to(tl.float32)
        if PARTS == 2:
            value += tl.load(from_low + low_part, mask=inside, other=0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + tl.load(routes + row, mask=here, other=0), mask=here, other=0)[:, None]
        from_wide = wide + row.to(tl.int64)[:, None] * wide_row + col[None, :]
        other = tl.load(from_wide, mask=here[:, None] & (col < cols)[None, :], other=0)
        if DROPS:
            other = tl.where(_stays(routes, row, here, col, low_key, high_key, threshold), other, 0)
        sums = tl.dot(tl.trans(value.to(tl.bfloat16)), other, sums)
    sums *= factor
    if SCALED:
        sums /= tl.load(scale + expert * scale_expert + col, mask=col < cols, other=1)[None, :]
    to = out + expert.to(tl.int64) * out_expert + rank.to(tl.int64)[:, None] * out_rank + col[None, :] * out_col
    inside = (rank < ranks)[:, None] & (col < cols)[None, :]
    tl.store(to, tl.load(to, mask=inside, other=0) + sums, mask=inside)


def _mask(dropout: Dropout | None) -> tuple[int, int, int]:
    """Key and threshold as 32-bit arguments, whose types do not change with their values."""
    if dropout is None:
        return 0, 0, 0
    return signed(dropout.stream, 32), signed(dropout.stream >> 32, 32), signed(dropout.threshold, 32)


def _block(ranks: int) -> int:
    return min(RANKS, triton.next_power_of_2(ranks))


def _tiles(piece: Piece) -> tuple[int, dict[str, int]]:
    """At least as many tiles as the experts' rows make, and the constants of `_tile`."""
    experts = len(piece.counts)
    return triton.cdiv(piece.rows, ROWS) + experts, {"EXPERTS": max(32, triton.next_power_of_2(experts)), "ROWS": ROWS}


def low_rank(x: Tensor, a: Tensor, piece: Piece, dropout: Dropout | None, out: Tensor) -> None:
    """See `ops.Operations`."""
    cols, ranks = x.shape[1], a.shape[2]
    tiles, constants = _tiles(piece)
    _low_rank[(tiles, triton.cdiv(ranks, _block(ranks)))](
        x, x.stride(0), a, a.stride(0), a.stride(1), out, out.stride(0), out.stride(1),
        piece.ends, piece.row_route, len(piece.counts), cols, ranks, *_mask(dropout),
        DROPS=dropout is not None, RANKS=_block(ranks), COLS=COLS, **constants,
    )  # fmt: skip


def add_low_rank(low: Tensor, a: Tensor, piece: Piece, dropout: Dropout | None, out: Tensor) -> None:
    """See `ops.Operations`."""
    cols, ranks = out.shape[1], a.shape[2]
    tiles, constants = _tiles(piece)
    _add_low_rank[(tiles, triton.cdiv(cols, COLS))](
        low, low.stride(0), low.stride(1), a, a.stride(0), a.stride(1), out, out.stride(0),
        piece.ends, piece.row_route, len(piece.counts), cols, ranks, *_mask(dropout),
        DROPS=dropout is not None, RANKS=_block(ranks), COLS=COLS, **constants,
    )  # fmt: skip


def lora_gradient(
    low: Tensor,
    wide: Tensor,
    piece: Piece,
    weights: Tensor | None,
    dropout: Dropout | None,
    factor: float,
    scale: Tensor | None,
    out: Tensor,
) -> None:
    """See `ops.Operations`."""
    ranks, cols = out.shape[1], wide.shape[1]
    block = max(16, _block(ranks))
    _gradient[(len(piece.counts), triton.cdiv(cols, COLS), triton.cdiv(ranks, block))](
        low, low.stride(0), low.stride(1), wide, wide.stride(0), out, *out.stride(), piece.ends, piece.row_route,
        weights, scale, scale.stride(0) if scale is not None else 0, cols, ranks, *_mask(dropout), factor,
        PARTS=low.shape[1], WEIGHTED=weights is not None, SCALED=scale is not None, DROPS=dropout is not None,
        ROWS=ROWS, RANKS=block, COLS=COLS,
    )  # fmt: skip
