"""Packed tiles to bf16, in Triton: a program reads some tiles of one strip and writes 16 rows x COLS columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.ops.tiles import TILES, cdiv
from ktft.lanes.ops.triton_launch import short
from ktft.native.packed import PackedMatrix

COLS = 256


@triton.jit
def _strip(
    floats, out, out_row, out_rows, row, col, scale, strips, strip_codes, block_codes, block_floats,
    tiles, scales, biases, SCALED: tl.constexpr, BIASED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Where this program's strip begins among the codes, and its first row in out; its first column, its row, and where
    its scales begin among the floats. The program of the first columns writes the rows' scales and biases.
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
    FORMAT: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """bf16, int8 and fp8: `codes` has the dtype of the codes, fp8 as uint8."""
    source, to, first, row, at = _strip(
        floats, out, out_row, out_rows, row, col, scale, strips, strip_codes, block_codes, block_floats,
        tiles, scales, biases, SCALED, BIASED, COLS,
    )  # fmt: skip
    r = tl.arange(0, 16)[:, None]
    col = first + tl.arange(0, COLS)[None, :]
    TILE: tl.constexpr = 32 if FORMAT == "bf16" else 64
    code = tl.load(codes + source + col // TILE * (TILE * 16) + r * TILE + col % TILE, mask=col < cols, other=0)
    if FORMAT == "fp8":
        code = code.to(tl.uint16)
        half = ((code & 0x80) << 8 | (code & 0x7F) << 7).to(tl.float16, bitcast=True)
        across = (cols + 127) // 128
        block = floats + at + row // 128 * across + col // 128
        value = half.to(tl.float32) * 256 * tl.load(block, mask=col < cols, other=0)
    else:
        value = code.to(tl.float32)
    tl.store(to + r * out_row + col, value.to(tl.bfloat16), mask=col < cols)


@triton.jit
def _magnitude(code, FORMAT: tl.constexpr):
    """Of k4's and mxfp4's codes without their sign."""
    if FORMAT == "k4":  # the codebook, a byte a code
        half = tl.where(code < 4, 0x2D1F1206, 0x7F624D3C)
        value = (half >> (code % 4 * 8) & 0xFF).to(tl.float32)
    else:
        value = code.to(tl.float32)
        value = tl.where(code < 4, value / 2, tl.where(code < 6, value - 2, 2 * value - 8))
    return value


@triton.jit
def _nibble(code, scale, FORMAT: tl.constexpr):
    if FORMAT == "int4":
        value = (code - 8).to(tl.float32) * scale
    else:
        value = _magnitude(code & 7, FORMAT) * scale
        value = tl.where(code < 8, value, -value)
    return value


@short
@triton.jit
def _nibbles(
    codes, floats, halves, out, out_row, out_rows, row, col, scale, strips, strip_codes, block_codes, block_floats,
    cols, tiles, scales, biases,
    FORMAT: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """4-bit formats: 16 rows x groups x 16 bytes, with one scale a group."""
    source, to, first, _, _ = _strip(
        floats, out, out_row, out_rows, row, col, scale, strips, strip_codes, block_codes, block_floats,
        tiles, scales, biases, SCALED, BIASED, COLS,
    )  # fmt: skip
    TILE: tl.constexpr = 1152 if FORMAT == "int4" else 1088
    r = tl.arange(0, 16)[:, None, None]
    group = first // 32 + tl.arange(0, COLS // 32)[None, :, None]
    i = tl.arange(0, 16)[None, None, :]
    here = group * 32 < cols
    tile = source + group // 4 * TILE
    code = tl.load(codes + tile + r * 64 + group % 4 * 16 + i, mask=here, other=0).to(tl.int32)
    at = r * 4 + group % 4
    if FORMAT == "int4":
        factor = tl.load(halves + (tile + 1024) // 2 + at, mask=here, other=0).to(tl.float32)
    else:
        stored = tl.load(codes + tile + 1024 + at, mask=here, other=0).to(tl.int32)
        if FORMAT == "k4":
            factor = stored.to(tl.float32)
        else:  # 2^(stored - 127), of which the smallest is subnormal
            factor = tl.where(stored == 0, 0x00400000, stored << 23).to(tl.float32, bitcast=True)
    place = to + r * out_row + group * 32 + i
    tl.store(place, _nibble(code & 15, factor, FORMAT).to(tl.bfloat16), mask=here)
    tl.store(place + 16, _nibble(code >> 4, factor, FORMAT).to(tl.bfloat16), mask=here)


def decode(
    format: str,
    blocks: Tensor,
    matrices: Sequence[PackedMatrix],
    out: Tensor,
    scale: Tensor | None,
    row: int,
    col: int,
) -> None:
    """See `ops.Operations`."""
    first, floats = matrices[0], blocks.view(torch.float32)
    size = 2 if format == "bf16" else 1
    strips = first.rows // 16
    grid = (blocks.shape[0] * len(matrices) * strips, cdiv(first.cols, COLS))
    common = (
        out, out.stride(2), out.shape[2], row, col, scale, strips,
        first.strip_bytes // size, blocks.stride(0) // size, floats.stride(0), first.cols,
        tuple(matrix.tiles // size for matrix in matrices),
        tuple((matrix.scales or 0) // 4 for matrix in matrices),
        tuple((matrix.bias or 0) // 4 for matrix in matrices),
    )  # fmt: skip
    constants = {"FORMAT": format, "SCALED": scale is not None, "BIASED": first.bias is not None, "COLS": COLS}
    if TILES[format].table is None:
        dtype = {"bf16": torch.bfloat16, "int8": torch.int8, "fp8": torch.uint8}[format]
        _plain[grid](blocks.view(dtype), floats, *common, **constants)
    else:
        halves = blocks.view(torch.bfloat16) if format == "int4" else None
        _nibbles[grid](blocks, floats, halves, *common, **constants)
