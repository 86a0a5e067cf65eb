"""Products of experts that have few rows each, straight from packed bytes, in Triton.

A block of weights is decoded where it is multiplied, so that of each weight its code alone comes from memory: decoding
a chunk beforehand writes two bytes for each and reads them again. With many rows an expert each block would be decoded
for many blocks of rows, and a decoded chunk is faster.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.ops.triton_codes import (
    assembly,
    block_of,
    both_codes,
    code_size,
    constants,
    group_scale,
    offsets,
    packed_arguments,
    value_of,
)
from ktft.lanes.ops.triton_launch import cdiv, power_of_2, short
from ktft.lanes.ops.triton_lora import tile_of
from ktft.lanes.ops.weights import ChunkMatrix, PackedExperts, PackedPart
from ktft.lanes.routes import Piece
from ktft.native.packed import GROUP, PACKED_FORMATS, ROW_BYTES, SCALE_BLOCK, TILE_ROWS

ROWS, OUTPUTS, DEPTH = 64, 128, 64
"""Rows of an expert that a program multiplies; by so many rows of a matrix; outputs whose gradients it takes at once.
"""
FEW_ROWS = {"number": 128, "linear": 128, "signed": 128, "e4m3": 64}
"""The most rows an expert, on average, for which these products are faster than those of decoded weights, by the kind
of codes. On an H200 forward and backward of 64 rows of `k4` take 0.58 of the time, decoding included, of 128 rows 0.78.
"""
EXTRA = 32
"""Columns behind a matrix's inputs that are taken at once."""
_TILE_ROWS = tl.constexpr(TILE_ROWS)
_HALF = tl.constexpr(GROUP // 2)
_GROUP = tl.constexpr(GROUP)
_GROUPS = tl.constexpr(2 * ROW_BYTES // GROUP)
_BLOCK = tl.constexpr(SCALE_BLOCK)
# Triton must not compile a new kernel for what changes from call to call
UNSPECIALIZED = {"do_not_specialize": ("experts",), "do_not_specialize_on_alignment": ("ends",)}


@triton.jit
def _weights(
    codes, floats, halves, strip, within, row, tile, cols,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    ASM: tl.constexpr, NIBBLES: tl.constexpr, N: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Of N rows, bf16 `[N, ROW]` from one tile of each: the values of low and of high codes, or twice the values. A row
    is row `within` of the strip that begins `strip` behind `codes`. Scales of blocks begin at `floats`.
    """
    code = tl.load(codes + tile * TILE + (strip + within * ROW)[:, None] + tl.arange(0, ROW)[None, :])
    if NIBBLES:
        group = (within * _GROUPS)[:, None] + tl.arange(0, _GROUPS)[None, :]
        scale = group_scale(codes, halves, tile * TILE + strip[:, None], group, None, SCALES)
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (N, _GROUPS, _HALF)), (N, ROW))
        low, high = both_codes(code, scale, CODES, TABLE, UNIT, ASM)
    elif SCALES == "block":
        scale = tl.load(floats + row // _BLOCK * ((cols + _BLOCK - 1) // _BLOCK) + tile * ROW // _BLOCK)
        low = (value_of(code, CODES, TABLE, UNIT) * scale[:, None]).to(tl.bfloat16)
        high = low
    else:
        low = value_of(code, CODES, TABLE, UNIT).to(tl.bfloat16)
        high = low
    return low, high


@triton.jit
def _column(NIBBLES: tl.constexpr, ROW: tl.constexpr):
    """Of a tile, the columns of `_weights`' low values."""
    j = tl.arange(0, ROW)
    if NIBBLES:
        j = j // _HALF * _GROUP + j % _HALF
    return j


@short
@triton.jit(**UNSPECIALIZED)
def _outputs(
    x, x_row, codes, floats, halves, block_codes, block_floats, slots, held_codes, held_floats, held_halves,
    held_block_codes, held_block_floats, tiles, scales, biases, strip_codes, width, cols, values, value_row, value_rows,
    inputs, extra, first_row, first_col, out, ends, experts,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    ASM: tl.constexpr, NIBBLES: tl.constexpr, SLOTTED: tl.constexpr, ADDS: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, ROW: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """out `[rows, M * value_rows]` = or, if `ADDS`, += a slice's part: `width` outputs of each of M matrices from
    `first_row` on, for `cols` inputs from `first_col` on, of which `EVEN` says that they fill their tiles. Unless
    `ADDS`, the products with the `extra` columns behind the inputs belong to it.
    """
    if tl.program_id(1) * ROWS >= tl.load(ends + experts - 1) + experts * ROWS:  # most programs of a piece of few rows
        return
    expert, first, last = tile_of(ends, experts, tl.program_id(1), EXPERTS, ROWS)
    if first >= last:
        return
    across = (width + N - 1) // N
    which = tl.program_id(0) // across
    n = tl.program_id(0) % across * N + tl.arange(0, N)
    real = n < width
    of_matrix = tl.where(real, n, 0)
    codes, floats, halves = block_of(
        expert, codes, floats, halves, block_codes, block_floats, slots, held_codes, held_floats, held_halves,
        held_block_codes, held_block_floats, SLOTTED, SCALES,
    )  # fmt: skip
    at, scale = tiles[0], scales[0]
    if len(tiles) == 2:
        at, scale = tl.where(which == 0, tiles[0], tiles[1]), tl.where(which == 0, scales[0], scales[1])
    strip = at + of_matrix // _TILE_ROWS * strip_codes
    row = first + tl.arange(0, ROWS)
    here = (row < last)[:, None]
    from_x = x + row.to(tl.int64)[:, None] * x_row
    to = out + row.to(tl.int64)[:, None] * (len(tiles) * value_rows) + (which * value_rows + first_row + n)[None, :]
    stored = here & real[None, :]
    sums = tl.zeros((ROWS, N), tl.float32)
    if ADDS:
        sums += tl.load(to, mask=stored, other=0).to(tl.float32)
    column = _column(NIBBLES, ROW)[None, :]
    COLS: tl.constexpr = 2 * ROW if NIBBLES else ROW
    for tile in range(0, (cols + COLS - 1) // COLS):
        low, high = _weights(
            codes, floats + scale, halves, strip, of_matrix % _TILE_ROWS, of_matrix, tile, cols,
            CODES, TABLE, UNIT, SCALES, TILE, ASM, NIBBLES, N, ROW,
        )  # fmt: skip
        inside = here if EVEN else here & (tile * COLS + column < cols)
        from_tile = from_x + (first_col + tile * COLS) + column
        sums = tl.dot(tl.load(from_tile, mask=inside, other=0), tl.trans(low), sums)
        if NIBBLES:
            sums = tl.dot(tl.load(from_tile + _HALF, mask=inside, other=0), tl.trans(high), sums)
    if not ADDS:
        more = values + (expert * len(tiles) * value_rows + which * value_rows + first_row + of_matrix) * value_row
        for begin in range(0, extra, EXTRA):
            e = begin + tl.arange(0, EXTRA)[None, :]
            weight = tl.load(more[:, None] + inputs + e, mask=e < extra, other=0)
            value = tl.load(from_x + inputs + e, mask=here & (e < extra), other=0)
            sums = tl.dot(value, tl.trans(weight), sums)
    tl.store(to, sums.to(tl.bfloat16), mask=stored)


@short
@triton.jit(**UNSPECIALIZED)
def _input_grads(
    dy, codes, floats, halves, block_codes, block_floats, slots, held_codes, held_floats, held_halves,
    held_block_codes, held_block_floats, tiles, scales, biases, strip_codes, width, cols, values, value_row, value_rows,
    inputs, extra, first_row, first_col, out, ends, experts,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    ASM: tl.constexpr, NIBBLES: tl.constexpr, SLOTTED: tl.constexpr, ADDS: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, ROW: tl.constexpr, EVEN: tl.constexpr, N: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """out `[rows, value_row]` = or, if `ADDS`, += what a slice, as in `_outputs`, gives for dy, which is as `out` is
    there. `EVEN` says that outputs fill blocks of N. Programs behind those of the slice's tiles compute the `extra`
    columns, from all outputs.
    """
    if tl.program_id(1) * ROWS >= tl.load(ends + experts - 1) + experts * ROWS:  # most programs of a piece of few rows
        return
    expert, first, last = tile_of(ends, experts, tl.program_id(1), EXPERTS, ROWS)
    if first >= last:
        return
    COLS: tl.constexpr = 2 * ROW if NIBBLES else ROW
    tile = tl.program_id(0)
    row = first + tl.arange(0, ROWS)
    here = (row < last)[:, None]
    k = tl.arange(0, N)
    from_dy = dy + row.to(tl.int64)[:, None] * (len(tiles) * value_rows) + k[None, :]
    to = out + row.to(tl.int64)[:, None] * value_row
    every = (cols + COLS - 1) // COLS
    if tile < every:
        codes, floats, halves = block_of(
            expert, codes, floats, halves, block_codes, block_floats, slots, held_codes, held_floats, held_halves,
            held_block_codes, held_block_floats, SLOTTED, SCALES,
        )  # fmt: skip
        col = (tile * COLS + _column(NIBBLES, ROW))[None, :]
        place = to + first_col + col
        stored = here & (col < cols)
        lows, highs = tl.zeros((ROWS, ROW), tl.float32), tl.zeros((ROWS, ROW), tl.float32)
        if ADDS:
            lows += tl.load(place, mask=stored, other=0).to(tl.float32)
            if NIBBLES:
                highs += tl.load(place + _HALF, mask=stored, other=0).to(tl.float32)
        down, strip, within = (width + N - 1) // N, k // _TILE_ROWS * strip_codes, k % _TILE_ROWS
        for i in range(0, down * len(tiles)):
            which, begin = i // down, i % down * N
            at, scale = tiles[0], scales[0]
            if len(tiles) == 2:
                at, scale = tl.where(which == 0, tiles[0], tiles[1]), tl.where(which == 0, scales[0], scales[1])
            at += begin // _TILE_ROWS * strip_codes
            inside, strips = here, strip
            if not EVEN:
                real = begin + k < width
                inside, strips = here & real[None, :], tl.where(real, strip, 0)
            low, high = _weights(
                codes + at, floats + scale, halves + at // 2, strips, within, begin + k, tile, cols,
                CODES, TABLE, UNIT, SCALES, TILE, ASM, NIBBLES, N, ROW,
            )  # fmt: skip
            grad = tl.load(from_dy + (which * value_rows + first_row + begin), mask=inside, other=0)
            lows = tl.dot(grad, low, lows)
            if NIBBLES:
                highs = tl.dot(grad, high, highs)
        tl.store(place, lows.to(tl.bfloat16), mask=stored)
        if NIBBLES:
            tl.store(place + _HALF, highs.to(tl.bfloat16), mask=stored)
    else:
        e = (tile - every) * EXTRA + tl.arange(0, EXTRA)[None, :]
        sums = tl.zeros((ROWS, EXTRA), tl.float32)
        outputs = len(tiles) * value_rows
        more = values + expert * outputs * value_row + inputs + e
        for begin in range(0, outputs, N):
            real = begin + k < outputs
            grad = tl.load(from_dy + begin, mask=here & real[None, :], other=0)
            weight = tl.load(more + (begin + k)[:, None] * value_row, mask=real[:, None] & (e < extra), other=0)
            sums = tl.dot(grad, weight, sums)
        tl.store(to + inputs + e, sums.to(tl.bfloat16), mask=here & (e < extra))


def reads_packed(format: str, rows_each: float) -> bool:
    return rows_each <= FEW_ROWS[constants(format)["CODES"]]


def outputs(x: Tensor, matrix: ChunkMatrix, packed: PackedExperts, piece: Piece) -> Tensor:
    out = x.new_empty(x.shape[0], matrix.values.shape[1])
    for part in packed.parts(matrix):
        width, shared = part.matrices[0].rows, _constants(part, piece)
        across = (1 + shared["NIBBLES"]) * shared["ROW"]
        _outputs[(len(part.matrices) * cdiv(width, OUTPUTS), _tiles(piece))](
            x, x.stride(0), *_arguments(part, matrix), out, piece.ends, piece.experts,
            **shared, ADDS=part.col > 0, EVEN=part.matrices[0].cols % across == 0, N=OUTPUTS,
        )  # fmt: skip
    return out


def input_grads(dy: Tensor, matrix: ChunkMatrix, packed: PackedExperts, piece: Piece) -> Tensor:
    out = dy.new_empty(dy.shape[0], matrix.values.shape[2])
    for number, part in enumerate(packed.parts(matrix)):
        width, shared = part.matrices[0].rows, _constants(part, piece)
        across = (1 + shared["NIBBLES"]) * shared["ROW"]
        further = cdiv(matrix.values.shape[2] - matrix.inputs, EXTRA) if number == 0 else 0
        _input_grads[(cdiv(part.matrices[0].cols, across) + further, _tiles(piece))](
            dy, *_arguments(part, matrix), out, piece.ends, piece.experts,
            **shared, ADDS=part.row > 0, EVEN=width % DEPTH == 0, N=DEPTH,
        )  # fmt: skip
    return out


def _tiles(piece: Piece) -> int:
    """A bound on the number of tiles that the experts' rows make."""
    return cdiv(piece.rows, ROWS) + piece.experts


def _arguments(part: PackedPart, matrix: ChunkMatrix) -> tuple[Any, ...]:
    packed, first, values = packed_arguments(part), part.matrices[0], matrix.values
    return (
        *packed, *offsets(part), first.strip_bytes // packed[0].element_size(), first.rows, first.cols, values,
        values.shape[2], values.shape[1] // len(part.matrices), matrix.inputs, values.shape[2] - matrix.inputs,
        part.row, part.col,
    )  # fmt: skip


def _constants(part: PackedPart, piece: Piece) -> dict[str, Any]:
    return {
        **constants(part.format),
        "ASM": assembly(part.format, part.blocks.device),
        "NIBBLES": bool(PACKED_FORMATS[part.format].values),
        "SLOTTED": part.slots is not None,
        "EXPERTS": max(32, power_of_2(piece.experts)),
        "ROWS": ROWS,
        "ROW": ROW_BYTES // code_size(part.format),
        "EXTRA": EXTRA,
    }
