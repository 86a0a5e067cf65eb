"""Packed tiles to bf16, in Triton. Each program reads some tiles of one strip and writes 16 rows x COLS columns."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.ops.triton_codes import ROWS, columns, constants, groups, value_of, views
from ktft.lanes.ops.triton_launch import cdiv, short
from ktft.lanes.ops.weights import ChunkMatrix
from ktft.native.packed import PACKED_FORMATS, TILE_ROWS, PackedMatrix

COLS = 256


@short
@triton.jit
def _decode(
    codes, floats, halves, block_codes, block_floats, slots, held_codes, held_floats, held_halves, held_block_codes,
    held_block_floats, out, out_row, out_rows, row, col, scale, strips, strip_codes, cols, tiles, scales, biases,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    GROUPED: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, FOLDED: tl.constexpr, SLOTTED: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """`codes` has the codes' dtype, uint8 for E4M3 and for 4 bits. `SLOTTED`: `slots` says where experts lie, among the
    blocks or those that are held. `GROUPED`: of 4 bits, with one scale for each group of columns. `FOLDED`: values are
    multiplied by the scales of their rows.

    The program of a strip's first columns also writes the scales and biases of its rows.
    """
    strip = tl.program_id(0) % strips
    which = tl.program_id(0) // strips % len(tiles)
    expert = (tl.program_id(0) // strips // len(tiles)).to(tl.int64)
    slot = expert
    if SLOTTED:
        slot = tl.load(slots + expert).to(tl.int64)
        if slot >= 0:
            codes, floats, halves = held_codes, held_floats, held_halves
            block_codes, block_floats = held_block_codes, held_block_floats
        else:
            slot = -1 - slot
    mine_tiles, mine_scales, mine_bias = tiles[0], scales[0], biases[0]
    if len(tiles) == 2:
        mine_tiles = tl.where(which == 0, tiles[0], tiles[1])
        mine_scales = tl.where(which == 0, scales[0], scales[1])
        mine_bias = tl.where(which == 0, biases[0], biases[1])
    first_row = (expert * len(tiles) + which) * out_rows + row + strip * 16
    if (SCALED or BIASED) and tl.program_id(1) == 0:
        r = tl.arange(0, 16)
        block = floats + slot * block_floats + strip * 16 + r
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
    source = slot * block_codes + mine_tiles + strip.to(tl.int64) * strip_codes
    to, first = out + first_row * out_row + col, tl.program_id(1) * COLS
    row_scale = tl.full((16,), 1.0, tl.float32)
    if FOLDED:
        row_scale = tl.load(floats + slot * block_floats + mine_scales + strip * 16 + tl.arange(0, 16))
    if GROUPED:
        code, factor, column, i, here = groups(codes, halves, source, first, cols, SCALES, TILE, COLS)
        # Rounded to bf16, as the products of experts take them, before a row's scale
        low = (value_of(code & 15, CODES, TABLE, UNIT) * factor).to(tl.bfloat16)
        high = (value_of(code >> 4, CODES, TABLE, UNIT) * factor).to(tl.bfloat16)
        if FOLDED:
            low, high = low.to(tl.float32) * row_scale[:, None, None], high.to(tl.float32) * row_scale[:, None, None]
        place = to + tl.arange(0, ROWS)[:, None, None] * out_row + column + i
        tl.store(place, low.to(out.dtype.element_ty), mask=here)
        tl.store(place + 16, high.to(out.dtype.element_ty), mask=here)
    else:
        at = slot * block_floats + mine_scales
        value, column, here = columns(
            codes, floats, source, at, strip * 16, first, cols, CODES, TABLE, UNIT, SCALES, TILE, COLS
        )
        if FOLDED:
            value = value * row_scale[:, None]
        tl.store(to + tl.arange(0, ROWS)[:, None] * out_row + column, value.to(out.dtype.element_ty), mask=here)


def decode(
    format: str, blocks: Tensor, slots: Tensor | None, held: Tensor | None, matrices: Sequence[PackedMatrix],
    out: ChunkMatrix, row: int, col: int,
) -> None:  # fmt: skip
    values, scale = out.by_projection
    _launch(format, blocks, slots, held, matrices, values, scale, row, col, folded=False)


def decode_matrix(format: str, packed: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
    folded = PACKED_FORMATS[format].row_scaled
    _launch(format, packed[None], None, None, [matrix], out[None, None], None, 0, 0, folded)


def _launch(
    format: str, blocks: Tensor, slots: Tensor | None, held: Tensor | None, matrices: Sequence[PackedMatrix],
    values: Tensor, scale: Tensor | None, row: int, col: int, folded: bool,
) -> None:  # fmt: skip
    """Decode to values `[experts, matrices, rows, columns]`, and scales likewise if there are any."""
    first, (codes, floats, halves) = matrices[0], views(format, blocks)
    others = views(format, blocks if held is None else held)
    size = codes.element_size()
    strips = first.rows // TILE_ROWS
    _decode[(values.shape[0] * len(matrices) * strips, cdiv(first.cols, COLS))](
        codes, floats, halves, codes.stride(0), floats.stride(0), slots, *others, others[0].stride(0),
        others[1].stride(0), values, values.stride(2), values.shape[2], row, col, scale, strips,
        first.strip_bytes // size, first.cols,
        tuple(matrix.tiles // size for matrix in matrices),
        tuple((matrix.scales or 0) // 4 for matrix in matrices),
        tuple((matrix.bias or 0) // 4 for matrix in matrices),
        **constants(format), GROUPED=bool(PACKED_FORMATS[format].values), SCALED=scale is not None,
        BIASED=first.bias is not None, FOLDED=folded, SLOTTED=slots is not None, COLS=COLS,
    )  # fmt: skip
