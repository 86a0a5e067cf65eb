"""Packed tiles to bf16, in Triton. Each program reads some tiles of one strip and writes 16 rows x COLS columns."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.ops.tiles import cdiv
from ktft.lanes.ops.triton_codes import ROWS, columns, constants, groups, value_of, views
from ktft.lanes.ops.triton_launch import short
from ktft.native.packed import PACKED_FORMATS, TILE_ROWS, PackedMatrix

COLS = 256


@triton.jit
def _strip(
    floats, out, out_row, out_rows, row, col, scale, strips, strip_codes, block_codes, block_floats,
    tiles, scales, biases, SCALED: tl.constexpr, BIASED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Where this program's strip begins among the codes, and where its first row goes in out; the program's first
    column, the strip's first row in the matrix, and where the matrix's scales begin among the floats.

    The program of a strip's first columns also writes the scales and biases of its rows.
    """
    strip = tl.program_id(0) % strips
    which = tl.program_id(0) // strips % len(tiles)
    expert = (tl.program_id(0) // strips // len(tiles)).to(tl.int64)
    mine_tiles, mine_scales, mine_bias = tiles[0], scales[0], biases[0]
    if len(tiles) == 2:
        mine_tiles = tl.where(which == 0, tiles[0], tiles[1])
        mine_scales = tl.where(which == 0, scales[0], scales[1])
        mine_bias = tl.where(which == 0, biases[0], biases[1])
    first_row = (expert * len(tiles) + which) * out_rows + row + strip * 16
    if (SCALED or BIASED) and tl.program_id(1) == 0:
        r = tl.arange(0, 16)
        block = floats + expert * block_floats + strip * 16 + r
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
    source = expert * block_codes + mine_tiles + strip.to(tl.int64) * strip_codes
    at = expert * block_floats + mine_scales
    return source, out + first_row * out_row + col, tl.program_id(1) * COLS, strip * 16, at


@short
@triton.jit
def _plain(
    codes, floats, out, out_row, out_rows, row, col, scale, strips, strip_codes, block_codes, block_floats,
    cols, tiles, scales, biases,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Formats whose codes are whole bytes; `codes` has the codes' dtype, uint8 for E4M3."""
    source, to, first, row, at = _strip(
        floats, out, out_row, out_rows, row, col, scale, strips, strip_codes, block_codes, block_floats,
        tiles, scales, biases, SCALED, BIASED, COLS,
    )  # fmt: skip
    value, col, here = columns(codes, floats, source, at, row, first, cols, CODES, TABLE, UNIT, SCALES, TILE, COLS)
    tl.store(to + tl.arange(0, ROWS)[:, None] * out_row + col, value.to(tl.bfloat16), mask=here)


@short
@triton.jit
def _nibbles(
    codes, floats, halves, out, out_row, out_rows, row, col, scale, strips, strip_codes, block_codes, block_floats,
    cols, tiles, scales, biases,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Formats of 4 bits, which have one scale for each group of columns."""
    source, to, first, _, _ = _strip(
        floats, out, out_row, out_rows, row, col, scale, strips, strip_codes, block_codes, block_floats,
        tiles, scales, biases, SCALED, BIASED, COLS,
    )  # fmt: skip
    code, factor, col, i, here = groups(codes, halves, source, first, cols, SCALES, TILE, COLS)
    place = to + tl.arange(0, ROWS)[:, None, None] * out_row + col + i
    tl.store(place, (value_of(code & 15, CODES, TABLE, UNIT) * factor).to(tl.bfloat16), mask=here)
    tl.store(place + 16, (value_of(code >> 4, CODES, TABLE, UNIT) * factor).to(tl.bfloat16), mask=here)


def decode(
    format: str,
    blocks: Tensor,
    matrices: Sequence[PackedMatrix],
    out: Tensor,
    scale: Tensor | None,
    row: int,
    col: int,
) -> None:
    """See `Operations`."""
    first, (codes, floats, halves) = matrices[0], views(format, blocks)
    size = codes.element_size()
    strips = first.rows // TILE_ROWS
    grid = (blocks.shape[0] * len(matrices) * strips, cdiv(first.cols, COLS))
    common = (
        out, out.stride(2), out.shape[2], row, col, scale, strips,
        first.strip_bytes // size, codes.stride(0), floats.stride(0), first.cols,
        tuple(matrix.tiles // size for matrix in matrices),
        tuple((matrix.scales or 0) // 4 for matrix in matrices),
        tuple((matrix.bias or 0) // 4 for matrix in matrices),
    )  # fmt: skip
    compiled_for = {**constants(format), "SCALED": scale is not None, "BIASED": first.bias is not None, "COLS": COLS}
    if PACKED_FORMATS[format].values:
        _nibbles[grid](codes, floats, halves, *common, **compiled_for)
    else:
        _plain[grid](codes, floats, *common, **compiled_for)
