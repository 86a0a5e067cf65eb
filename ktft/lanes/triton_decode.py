"""Packed tiles to bf16, in Triton: a program reads some tiles of one strip and writes 16 rows x COLS columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.tiles import TILES
from ktft.native.packed import PackedMatrix

COLS = 256


@triton.jit
def _strip(out, out_expert, out_row, strips, tiles, strip_bytes, block_bytes, COLS: tl.constexpr):
    """Offset of this program's strip in the blocks, its first row's place in out, its first column, its row and
    expert.
    """
    expert = (tl.program_id(0) // strips).to(tl.int64)
    strip = (tl.program_id(0) % strips).to(tl.int64)
    source = expert * block_bytes + tiles + strip * strip_bytes
    return source, out + expert * out_expert + strip * 16 * out_row, tl.program_id(1) * COLS, strip * 16, expert


@triton.jit
def _plain(
    codes, floats, out, out_expert, out_row, strips, cols, tiles, strip_bytes, block_bytes, scales,
    FORMAT: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """bf16, int8 and fp8: `codes` has the dtype of the codes, fp8 as uint8; offsets are in codes."""
    source, to, first, row, expert = _strip(out, out_expert, out_row, strips, tiles, strip_bytes, block_bytes, COLS)
    r = tl.arange(0, 16)[:, None]
    col = first + tl.arange(0, COLS)[None, :]
    TILE: tl.constexpr = 32 if FORMAT == "bf16" else 64
    code = tl.load(codes + source + col // TILE * (TILE * 16) + r * TILE + col % TILE, mask=col < cols, other=0)
    if FORMAT == "fp8":
        code = code.to(tl.uint16)
        half = ((code & 0x80) << 8 | (code & 0x7F) << 7).to(tl.float16, bitcast=True)
        across = (cols + 127) // 128
        at = floats + expert * (block_bytes // 4) + scales // 4 + row // 128 * across + col // 128
        value = half.to(tl.float32) * 256 * tl.load(at, mask=col < cols, other=0)
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


@triton.jit
def _nibbles(
    codes, halves, out, out_expert, out_row, strips, cols, tiles, strip_bytes, block_bytes,
    FORMAT: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """4-bit formats: 16 rows x groups x 16 bytes, with one scale a group."""
    source, to, first, _, _ = _strip(out, out_expert, out_row, strips, tiles, strip_bytes, block_bytes, COLS)
    TILE: tl.constexpr = 1152 if FORMAT == "int4" else 1088
    r = tl.arange(0, 16)[:, None, None]
    group = first // 32 + tl.arange(0, COLS // 32)[None, :, None]
    i = tl.arange(0, 16)[None, None, :]
    here = group * 32 < cols
    tile = source + group // 4 * TILE
    code = tl.load(codes + tile + r * 64 + group % 4 * 16 + i, mask=here, other=0).to(tl.int32)
    at = r * 4 + group % 4
    if FORMAT == "int4":
        scale = tl.load(halves + (tile + 1024) // 2 + at, mask=here, other=0).to(tl.float32)
    else:
        stored = tl.load(codes + tile + 1024 + at, mask=here, other=0).to(tl.int32)
        if FORMAT == "k4":
            scale = stored.to(tl.float32)
        else:  # 2^(stored - 127), of which the smallest is subnormal
            scale = tl.where(stored == 0, 0x00400000, stored << 23).to(tl.float32, bitcast=True)
    place = to + r * out_row + group * 32 + i
    tl.store(place, _nibble(code & 15, scale, FORMAT).to(tl.bfloat16), mask=here)
    tl.store(place + 16, _nibble(code >> 4, scale, FORMAT).to(tl.bfloat16), mask=here)


def decode(format: str, blocks: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
    """See `ops.Operations`."""
    strips = matrix.rows // 16
    grid = (blocks.shape[0] * strips, triton.cdiv(matrix.cols, COLS))
    to = (out, out.stride(0), out.stride(1), strips, matrix.cols)
    if TILES[format].table is None:
        codes = blocks.view({"bf16": torch.bfloat16, "int8": torch.int8}.get(format, torch.uint8))
        size = codes.element_size()
        offsets = (matrix.tiles // size, matrix.strip_bytes // size, blocks.stride(0) // size)
        _plain[grid](codes, blocks.view(torch.float32), *to, *offsets, matrix.scales or 0, FORMAT=format, COLS=COLS)
    else:
        offsets = (matrix.tiles, matrix.strip_bytes, blocks.stride(0))
        _nibbles[grid](blocks, blocks.view(torch.bfloat16), *to, *offsets, FORMAT=format, COLS=COLS)
