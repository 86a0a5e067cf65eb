"""Packed tiles to bf16, in Triton. Each program reads some tiles of one strip and writes 16 rows x COLS columns."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.ops.triton_codes import (
    ROWS,
    assembly,
    block_of,
    both_codes,
    columns,
    constants,
    groups,
    offsets,
    packed_arguments,
)
from ktft.lanes.ops.triton_launch import cdiv, short
from ktft.lanes.ops.weights import ChunkMatrix, PackedPart
from ktft.native.packed import PACKED_FORMATS, TILE_ROWS, PackedMatrix

COLS = 256


@short
@triton.jit
def _decode(
    codes, floats, halves, block_codes, block_floats, slots, held_codes, held_floats, held_halves, held_block_codes,
    held_block_floats, out, out_row, out_rows, row, col, scale, strips, strip_codes, cols, tiles, scales, biases,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    GROUPED: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, FOLDED: tl.constexpr, SLOTTED: tl.constexpr,
    VALUES: tl.constexpr, ASM: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """`codes` has the codes' dtype, uint8 for E4M3 and for 4 bits. `SLOTTED`: `slots` says where experts lie, among the
    blocks or those that are held. `GROUPED`: of 4 bits, with one scale for each group of columns. `FOLDED`: values are
    multiplied by the scales of their rows.

    The program of a strip's first columns also writes the scales and biases of its rows; without `VALUES` no more.
    """
    strip = tl.program_id(0) % strips
    which = tl.program_id(0) // strips % len(tiles)
    expert = (tl.program_id(0) // strips // len(tiles)).to(tl.int64)
    codes, floats, halves = block_of(
        expert, codes, floats, halves, block_codes, block_floats, slots, held_codes, held_floats, held_halves,
        held_block_codes, held_block_floats, SLOTTED, SCALES,
    )  # fmt: skip
    mine_tiles, mine_scales, mine_bias = tiles[0], scales[0], biases[0]
    if len(tiles) == 2:
        mine_tiles = tl.where(which == 0, tiles[0], tiles[1])
        mine_scales = tl.where(which == 0, scales[0], scales[1])
        mine_bias = tl.where(which == 0, biases[0], biases[1])
    first_row = (expert * len(tiles) + which) * out_rows + row + strip * 16
    if (SCALED or BIASED) and tl.program_id(1) == 0:
        r = tl.arange(0, 16)
        block = floats + strip * 16 + r
        value = tl.full((16,), 1.0, tl.float32)
        if SCALED:
            value = tl.load(block + mine_scales)
            tl.store(scale + first_row + r, value)
        if BIASED:
            bias = (tl.load(block + mine_bias) / value)[:, None]
            high = bias.to(tl.bfloat16).to(tl.float32)
            c = tl.arange(0, 16)[None, :]
            both = tl.where(c == 0, high, tl.where(c == 1, bias - high, 0.0))
            tl.store(out + (first_row + r + 1)[:, None] * out_row - 16 + c, both.to(tl.bfloat16))
    if not VALUES:
        return
    source = mine_tiles + strip.to(tl.int64) * strip_codes
    to, first = out + first_row * out_row + col, tl.program_id(1) * COLS
    row_scale = tl.full((16,), 1.0, tl.float32)
    if FOLDED:
        row_scale = tl.load(floats + mine_scales + strip * 16 + tl.arange(0, 16))
    if GROUPED:
        code, factor, column, i, here = groups(codes, halves, source, first, cols, SCALES, TILE, COLS)
        low, high = both_codes(code, factor, CODES, TABLE, UNIT, ASM)
        if FOLDED:
            low, high = low.to(tl.float32) * row_scale[:, None, None], high.to(tl.float32) * row_scale[:, None, None]
        place = to + tl.arange(0, ROWS)[:, None, None] * out_row + column + i
        tl.store(place, low.to(out.dtype.element_ty), mask=here)
        tl.store(place + 16, high.to(out.dtype.element_ty), mask=here)
    else:
        value, column, here = columns(
            codes, floats, source, mine_scales, strip * 16, first, cols, CODES, TABLE, UNIT, SCALES, TILE, COLS
        )
        if FOLDED:
            value = value * row_scale[:, None]
        tl.store(to + tl.arange(0, ROWS)[:, None] * out_row + column, value.to(out.dtype.element_ty), mask=here)


def decode(part: PackedPart, out: ChunkMatrix, values: bool) -> None:
    to, scale = out.by_projection
    if values or scale is not None or part.matrices[0].bias is not None:
        _launch(part, to, scale, values, folded=False)


def decode_matrix(format: str, packed: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
    folded = PACKED_FORMATS[format].row_scaled
    _launch(PackedPart(format, packed[None], None, None, [matrix], 0, 0), out[None, None], None, True, folded)


def _launch(part: PackedPart, to: Tensor, scale: Tensor | None, values: bool, folded: bool) -> None:
    """Decode to `[experts, matrices, rows, columns]`, and scales likewise if there are any."""
    first, matrices = part.matrices[0], len(part.matrices)
    packed = packed_arguments(part)
    _decode[(to.shape[0] * matrices * (first.rows // TILE_ROWS), cdiv(first.cols, COLS) if values else 1)](
        *packed, to, to.stride(2), to.shape[2], part.row, part.col, scale, first.rows // TILE_ROWS,
        first.strip_bytes // packed[0].element_size(), first.cols, *offsets(part),
        **constants(part.format), GROUPED=bool(PACKED_FORMATS[part.format].values), SCALED=scale is not None,
        BIASED=first.bias is not None, FOLDED=folded, SLOTTED=part.slots is not None, VALUES=values,
        ASM=assembly(part.format, to.device), COLS=COLS,
    )  # fmt: skip
