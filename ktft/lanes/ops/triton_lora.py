"""Low-rank products of rows grouped by expert, with dropout's masks, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.ops.dropout import Dropout, signed
from ktft.lanes.ops.triton_launch import cdiv, power_of_2, short
from ktft.lanes.ops.weights import Adapters
from ktft.lanes.routes import Piece
from ktft.lora import LoraPair

ROWS, RANKS, COLS = 32, 64, 128
PLACE_COLS = 1024
# Triton must not compile a new kernel for what changes from call to call
UNSPECIALIZED = {
    "do_not_specialize": ("experts", "threshold", "kept"),
    "do_not_specialize_on_alignment": ("ends", "routes"),
}


@triton.jit
def tile_of(ends, experts, tile, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """The expert of a tile, which is at most ROWS of that expert's rows: from `first` to before `last`."""
    g = tl.arange(0, EXPERTS)
    end = tl.load(ends + g, mask=g < experts, other=0)
    begin = tl.load(ends + g - 1, mask=(g > 0) & (g < experts), other=0)
    tiles = tl.where(g < experts, (end - begin + ROWS - 1) // ROWS, 0)
    upto = tl.cumsum(tiles, 0)
    expert = tl.sum((upto <= tile).to(tl.int32), 0)
    mine = g == expert
    first = tl.sum(tl.where(mine, begin + (tile - upto + tiles) * ROWS, 0), 0)
    return expert.to(tl.int64), first, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _stays(routes, row, here, col, stream, threshold):
    """What `dropout.stays` says, for these rows and columns."""
    route = tl.load(routes + row, mask=here, other=0)
    key = route.to(tl.uint64) + tl.load(stream).to(tl.uint64, bitcast=True)
    key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9
    key = (key ^ (key >> 27)) * 0x94D049BB133111EB
    key = key ^ (key >> 31)
    z = (col.to(tl.uint32) * 0x9E3779B9)[None, :] ^ key.to(tl.uint32)[:, None]
    z = (z ^ (z >> 16)) * 0x7FEB352D
    z = (z ^ (z >> 15)) * 0x846CA68B
    z = z ^ (z >> 16)
    return (z ^ (key >> 32).to(tl.uint32)[:, None]) >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def _split_store(values, to, part, mask):
    """Write values as the sum of a high and a low part."""
    high = values.to(tl.bfloat16)
    tl.store(to, high, mask=mask)
    tl.store(to + part, (values - high.to(tl.float32)).to(tl.bfloat16), mask=mask)


@short
@triton.jit
def _place(
    a0, b0, a1, b1, rank0, rank1, begin1, scaling0, scaling1, kept, scale, a, b, b_row, inputs, outputs, rows, places,
    SCALED: tl.constexpr, TWO: tl.constexpr, PLACES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Each program writes some columns of one place of A, or some rows of B with all their places."""
    expert = tl.program_id(0).to(tl.int64)
    across = (inputs + COLS - 1) // COLS
    block = tl.program_id(1)
    if block < places * across:
        place = block // across
        col = block % across * COLS + tl.arange(0, COLS)
        inside = col < inputs
        value = tl.load(a0 + (expert * rank0 + place) * inputs + col, mask=inside & (place < rank0), other=0)
        value = value.to(tl.float32)
        if TWO:
            other = place - begin1
            here = inside & (other >= 0) & (other < rank1)
            value += tl.load(a1 + (expert * rank1 + other) * inputs + col, mask=here, other=0).to(tl.float32)
        _split_store(value / kept, a + (expert * 2 * places + place) * inputs + col, places * inputs, inside)
    else:
        row = (block - places * across) * ROWS + tl.arange(0, ROWS)[:, None]
        every = tl.arange(0, PLACES)[None, :]
        first = (row < outputs) & (every < rank0)
        values = tl.load(b0 + (expert * outputs + row) * rank0 + every, mask=first, other=0).to(tl.float32)
        factor = tl.where(row < outputs, scaling0, scaling1)
        if TWO:
            others = every - begin1
            second = (row >= outputs) & (row < rows) & (others >= 0) & (others < rank1)
            from_b = b1 + (expert * outputs + row - outputs) * rank1 + others
            values += tl.load(from_b, mask=second, other=0).to(tl.float32)
        if SCALED:
            factor /= tl.load(scale + expert * rows + row, mask=row < rows, other=1)
        to = b + (expert * rows + row) * b_row + inputs + every
        _split_store(values * factor, to, places, (row < rows) & (every < places))


@short
@triton.jit(**UNSPECIALIZED)
def _low_rank(
    rows, rows_row, a, ends, routes, experts, cols, places, begin, ranks, stream, threshold,
    DROPS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    expert, first, last = tile_of(ends, experts, tl.program_id(0), EXPERTS, ROWS)
    if first >= last:
        return
    row = first + tl.arange(0, ROWS)
    here = row < last
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    from_x = rows + row.to(tl.int64)[:, None] * rows_row
    from_a = a + (expert * 2 * places + begin + rank[:, None]) * cols
    sums = tl.zeros((ROWS, RANKS), tl.float32)
    for c in range(0, cols, COLS):
        col = c + tl.arange(0, COLS)
        value = tl.load(from_x + col[None, :], mask=here[:, None] & (col < cols)[None, :], other=0)
        if DROPS:
            value = tl.where(_stays(routes, row, here, col, stream, threshold), value, 0)
        inside = (rank < ranks)[:, None] & (col < cols)[None, :]
        sums = tl.dot(value, tl.trans(tl.load(from_a + col[None, :], mask=inside, other=0)), sums)
        sums = tl.dot(value, tl.trans(tl.load(from_a + places * cols + col[None, :], mask=inside, other=0)), sums)
    to = from_x + cols + begin + rank[None, :]
    inside = here[:, None] & (rank < ranks)[None, :]
    tl.store(to, sums.to(tl.bfloat16), mask=inside)
    tl.store(to + places, sums.to(tl.bfloat16), mask=inside)


@short
@triton.jit(**UNSPECIALIZED)
def _add_low_rank(
    rows, rows_row, a, ends, routes, experts, cols, places, begin, ranks, stream, threshold,
    DROPS: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, RANKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    expert, first, last = tile_of(ends, experts, tl.program_id(0), EXPERTS, ROWS)
    if first >= last:
        return
    row = first + tl.arange(0, ROWS)
    here = row < last
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    sums = tl.zeros((ROWS, COLS), tl.float32)
    at = rows + row.to(tl.int64)[:, None] * rows_row
    for r in range(0, ranks, RANKS):
        rank = r + tl.arange(0, RANKS)
        from_low = at + cols + begin + rank[None, :]
        inside = here[:, None] & (rank < ranks)[None, :]
        value = tl.load(from_low, mask=inside, other=0).to(tl.float32)
        value = (value + tl.load(from_low + places, mask=inside, other=0).to(tl.float32)).to(tl.bfloat16)
        from_a = a + (expert * 2 * places + begin + rank[:, None]) * cols + col[None, :]
        inside = (rank < ranks)[:, None] & (col < cols)[None, :]
        sums = tl.dot(value, tl.load(from_a, mask=inside, other=0), sums)
        sums = tl.dot(value, tl.load(from_a + places * cols, mask=inside, other=0), sums)
    if DROPS:
        sums = tl.where(_stays(routes, row, here, col, stream, threshold), sums, 0)
    to = at + col[None, :]
    inside = here[:, None] & (col < cols)[None, :]
    tl.store(to, (tl.load(to, mask=inside, other=0).to(tl.float32) + sums).to(tl.bfloat16), mask=inside)


@short
@triton.jit(**UNSPECIALIZED)
def _gradients(
    x, x_row, dx, dx_row, dy, out, ends, routes, weights, scale, experts, inputs, outputs, places, begin1, rank0, rank1,
    scaling0, scaling1, kept, stream, other_stream, threshold,
    ADDS: tl.constexpr, WEIGHTED: tl.constexpr, SCALED: tl.constexpr, DROPS: tl.constexpr, TWO: tl.constexpr,
    ROWS: tl.constexpr, RANKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Each program computes some columns of A's gradient or some rows of B's, for one expert and projection."""
    expert = tl.program_id(0)
    last = tl.load(ends + expert)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    if not ADDS or first < last:
        of_a, of_b = (inputs + COLS - 1) // COLS, (outputs + COLS - 1) // COLS
        block = tl.program_id(1)
        ranks, begin, scaling, before, side, dy_row = rank0, 0, scaling0, 0, 0, outputs
        if TWO:
            second = block >= of_a + of_b
            block -= tl.where(second, of_a + of_b, 0)
            ranks, begin = tl.where(second, rank1, rank0), tl.where(second, begin1, 0)
            scaling = tl.where(second, scaling1, scaling0)
            if DROPS:
                stream = tl.where(second, other_stream, stream)
            before = tl.where(second, experts.to(tl.int64) * rank0 * (inputs + outputs), 0)
            side, dy_row = tl.where(second, outputs, 0), 2 * outputs
        # A's gradient takes the places of dx, and x; B's the places of x, and dy
        is_a = block < of_a
        if is_a:
            low, low_row, wide, wide_row = dx, dx_row, x, x_row
        else:
            low, low_row, wide, wide_row = x, x_row, dy + side, dy_row
        cols = tl.where(is_a, inputs, outputs)
        col = tl.where(is_a, block, block - of_a) * COLS + tl.arange(0, COLS)
        rank = tl.program_id(2) * RANKS + tl.arange(0, RANKS)
        low += inputs + begin
        sums = tl.zeros((RANKS, COLS), tl.float32)
        for start in range(first, last, ROWS):
            row = start + tl.arange(0, ROWS)
            here = row < last
            from_low = low + row.to(tl.int64)[:, None] * low_row + rank[None, :]
            inside = here[:, None] & (rank < ranks)[None, :]
            value = tl.load(from_low, mask=inside, other=0).to(tl.float32)
            value += tl.load(from_low + places, mask=inside & is_a, other=0).to(tl.float32)  # both parts of x are equal
            if WEIGHTED:
                value *= tl.load(weights + tl.load(routes + row, mask=here, other=0), mask=here, other=0)[:, None]
            from_wide = wide + row.to(tl.int64)[:, None] * wide_row + col[None, :]
            other = tl.load(from_wide, mask=here[:, None] & (col < cols)[None, :], other=0)
            if DROPS:
                stays = _stays(routes, row, here, col, stream, threshold)
                other = tl.where(stays | (block >= of_a), other, 0)
            sums = tl.dot(tl.trans(value.to(tl.bfloat16)), other, sums)
        sums *= tl.where(is_a, 1 / kept, scaling)
        if SCALED:
            at = scale + expert * dy_row + side + col
            sums /= tl.load(at, mask=(col < cols) & (block >= of_a), other=1)[None, :]
        before += tl.where(is_a, 0, experts.to(tl.int64) * ranks * inputs)
        place = rank[:, None] * tl.where(is_a, inputs, 1) + col[None, :] * tl.where(is_a, 1, ranks)
        to = out + before + expert.to(tl.int64) * ranks * cols + place
        inside = (rank < ranks)[:, None] & (col < cols)[None, :]
        if ADDS:
            sums += tl.load(to, mask=inside, other=0)
        tl.store(to, sums, mask=inside)


def _mask(dropout: Dropout | None) -> tuple[Tensor | None, int]:
    """Stream and threshold, which is 32 bits, so that its type does not depend on its value."""
    return (dropout.stream, signed(dropout.threshold, 32)) if dropout is not None else (None, 0)


def _block(ranks: int) -> int:
    return min(RANKS, power_of_2(ranks))


def _tiles(piece: Piece) -> tuple[int, dict[str, int]]:
    """A bound on the number of tiles that the experts' rows make, and the constants of `tile_of`."""
    experts = piece.experts
    return cdiv(piece.rows, ROWS) + experts, {"EXPERTS": max(32, power_of_2(experts)), "ROWS": ROWS}


def _two(adapters: Adapters) -> tuple[LoraPair, int, LoraPair, int, bool]:
    """The pair and rank of the first and of the second projection, and whether there are two side by side. A projection
    without an adapter has rank 0.
    """
    some = next(pair for pair in adapters.pairs if pair is not None)
    first, two = adapters.pairs[0], len(adapters.pairs) == 2
    second = adapters.pairs[1] if two else None
    ranks = (pair.a.shape[1] if pair is not None else 0 for pair in (first, second))
    return first or some, next(ranks), second or some, next(ranks), two


def place(adapters: Adapters) -> None:
    first, rank0, second, rank1, two = _two(adapters)
    a, b, scale, places = adapters.a, adapters.b, adapters.scale, adapters.places
    experts, rows, b_row = b.shape
    inputs = a.shape[3]
    blocks = places * cdiv(inputs, PLACE_COLS) + cdiv(rows, ROWS)
    _place[(experts, blocks)](
        first.a, first.b, second.a, second.b, rank0, rank1, adapters.begins[-1], first.scaling, second.scaling,
        adapters.kept, scale, a, b, b_row, inputs, rows // 2 if two else rows, rows, places,
        SCALED=scale is not None, TWO=two, PLACES=power_of_2(places), ROWS=ROWS, COLS=PLACE_COLS,
    )  # fmt: skip


def low_rank(rows: Tensor, a: Tensor, piece: Piece, begin: int, end: int, dropout: Dropout | None) -> None:
    tiles, constants = _tiles(piece)
    block = _block(end - begin)
    _low_rank[(tiles, cdiv(end - begin, block))](
        rows, rows.stride(0), a, piece.ends, piece.row_route, piece.experts, a.shape[3], a.shape[2],
        begin, end - begin, *_mask(dropout),
        DROPS=dropout is not None, RANKS=block, COLS=COLS, **constants,
    )  # fmt: skip


def add_low_rank(rows: Tensor, a: Tensor, piece: Piece, begin: int, end: int, dropout: Dropout | None) -> None:
    tiles, constants = _tiles(piece)
    _add_low_rank[(tiles, cdiv(a.shape[3], COLS))](
        rows, rows.stride(0), a, piece.ends, piece.row_route, piece.experts, a.shape[3], a.shape[2],
        begin, end - begin, *_mask(dropout),
        DROPS=dropout is not None, RANKS=_block(end - begin), COLS=COLS, **constants,
    )  # fmt: skip


def lora_gradients(
    adapters: Adapters, x: Tensor, dx: Tensor, dy: Tensor, piece: Piece, weights: Tensor | None, out: Tensor, adds: bool
) -> None:
    first, rank0, second, rank1, two = _two(adapters)
    inputs, outputs, experts = first.a.shape[2], dy.shape[1] // (1 + two), piece.experts
    ranks = max(rank0, rank1)
    block = max(16, _block(ranks))
    blocks = (1 + two) * (cdiv(inputs, COLS) + cdiv(outputs, COLS))
    stream, threshold = _mask(adapters.dropouts[0])
    other_stream, _ = _mask(adapters.dropouts[-1])
    _gradients[(experts, blocks, cdiv(ranks, block))](
        x, x.stride(0), dx, dx.stride(0), dy, out, piece.ends, piece.row_route, weights, adapters.scale, experts,
        inputs, outputs, adapters.places, adapters.begins[-1], rank0, rank1, first.scaling, second.scaling,
        adapters.kept, stream, other_stream, threshold,
        ADDS=adds, WEIGHTED=weights is not None, SCALED=adapters.scale is not None,
        DROPS=adapters.dropouts[0] is not None, TWO=two, ROWS=ROWS, RANKS=block, COLS=COLS,
    )  # fmt: skip
