"""From packed codes to values, in Triton: the only reading of the formats there.

`triton_decode` and the products of few tokens (`ktft.serve.runtime.triton_resident`) call the same functions. Tables
and sizes come from the native core, so that a format whose codes and scales are of a kind below needs no line here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktft.native.packed import CODE_BYTES, GROUP, PACKED_FORMATS, ROW_BYTES, SCALE_BLOCK, TILE_ROWS, PackedFormat

ROWS = tl.constexpr(TILE_ROWS)
_ROW_BYTES = tl.constexpr(ROW_BYTES)
_CODE_BYTES = tl.constexpr(CODE_BYTES)
_GROUP = tl.constexpr(GROUP)
_HALF = tl.constexpr(GROUP // 2)
_GROUPS = tl.constexpr(2 * ROW_BYTES // GROUP)  # of a tile's row
_BLOCK = tl.constexpr(SCALE_BLOCK)


@triton.jit
def value_of(code, CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr):
    """What codes stand for without their scales, in fp32. 4-bit codes are int32."""
    if CODES == "number":
        value = code.to(tl.float32)
    elif CODES == "e4m3":  # an fp16 with 8 less in its exponent's bias
        code = code.to(tl.uint16)
        value = ((code & 0x80) << 8 | (code & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256
    elif CODES == "linear":  # code 0 stands for TABLE, each further code for 1 more
        # The bits of 2^23 + code: an instruction, where a conversion takes as long as two
        value = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 - TABLE)
    elif CODES == "signed":  # bit 3 is the sign; TABLE has the magnitudes of bits 0 to 2, a byte each
        LOW: tl.constexpr = TABLE % 4294967296
        HIGH: tl.constexpr = TABLE // 4294967296
        half = tl.where(code & 4 == 0, LOW, HIGH)
        value = (half >> ((code & 3) << 3) & 0xFF | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        value = (value.to(tl.int32, bitcast=True) ^ (code & 8) << 28).to(tl.float32, bitcast=True)
        if UNIT != 1:
            value *= UNIT
    return value


@triton.jit
def _group_scale(codes, halves, tile, at, here, SCALES: tl.constexpr):
    """The fp32 scales of groups, `at` being a group's number in its tile."""
    if SCALES == "bf16":
        scale = tl.load(halves + (tile + _CODE_BYTES) // 2 + at, mask=here, other=0).to(tl.float32)
    else:
        stored = tl.load(codes + tile + _CODE_BYTES + at, mask=here, other=0).to(tl.int32)
        if SCALES == "integer":
            scale = stored.to(tl.float32)
        elif SCALES == "power_of_two":  # 2^(stored - 127), of which the smallest is subnormal
            scale = tl.where(stored == 0, 0x00400000, stored << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def columns(
    codes, floats, source, blocks, row, first, cols,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Of a strip with whole-byte codes, 16 rows x COLS columns from `first` on: values times their blocks' scales, in
    fp32; the columns; and which of them exist. The strip begins at `codes + source` and is row `row` of the matrix,
    whose block scales begin at `floats + blocks`.
    """
    ROW: tl.constexpr = TILE // ROWS
    r = tl.arange(0, ROWS)[:, None]
    col = first + tl.arange(0, COLS)[None, :]
    here = col < cols
    code = tl.load(codes + source + col // ROW * TILE + r * ROW + col % ROW, mask=here, other=0)
    value = value_of(code, CODES, TABLE, UNIT)
    if SCALES == "block":
        at = blocks + row // _BLOCK * ((cols + _BLOCK - 1) // _BLOCK) + col // _BLOCK
        value *= tl.load(floats + at, mask=here, other=0)
    return value, col, here


@triton.jit
def groups(
    codes, halves, source, first, cols,
    SCALES: tl.constexpr, TILE: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Of a strip with 4-bit codes, 16 rows x COLS columns from `first` on: bytes of two codes, the low half for one of
    the first 16 columns of a group and the high half for the column 16 further; the groups' fp32 scales; their first
    columns, and what to add for each low half's column; and which groups exist. Shapes broadcast to `[16, groups, 16]`.
    """
    r = tl.arange(0, ROWS)[:, None, None]
    group = first // _GROUP + tl.arange(0, COLS // _GROUP)[None, :, None]
    i = tl.arange(0, _HALF)[None, None, :]
    here = group * _GROUP < cols
    tile = source + group // _GROUPS * TILE
    code = tl.load(codes + tile + r * _ROW_BYTES + group % _GROUPS * _HALF + i, mask=here, other=0).to(tl.int32)
    scale = _group_scale(codes, halves, tile, r * _GROUPS + group % _GROUPS, here, SCALES)
    return code, scale, group * _GROUP, i, here


@functools.cache
def constants(format: str) -> dict[str, Any]:
    """A format as the kernels are compiled for it.

    CODES is the kind of its codes and SCALES that of the scales which decoding applies, as above; TABLE and UNIT belong
    to CODES. TILE is the distance from one tile to the next: bytes, or elements where a code is larger.

    Raises:
        ValueError: a table of codes that no kind can hold.
    """
    form = PACKED_FORMATS[format]
    kind, table = _kind_of(form)
    return {
        "CODES": kind,
        "TABLE": table,
        "UNIT": form.unit,
        "SCALES": "block" if form.block_scaled else form.group_scales,
        "TILE": form.tile_bytes // _dtype(form).itemsize,
    }


def _kind_of(form: PackedFormat) -> tuple[str, int]:
    """CODES and TABLE."""
    if not form.values:
        return "e4m3" if form.code_dtype == torch.float8_e4m3fn else "number", 0
    steps = [value / form.unit for value in form.values]
    if form.unit == 1 and steps == [steps[0] + code for code in range(16)]:
        return "linear", int(steps[0])
    sizes = [int(step) for step in steps[:8]]
    if steps == [*sizes, *(-size for size in sizes)] and min(sizes) >= 0 and max(sizes) < 128:
        return "signed", sum(size << 8 * code for code, size in enumerate(sizes))
    raise ValueError(
        f"{form.name}: its codes stand for {form.values}, which is neither a range of integers nor eight magnitudes "
        "with their negatives; add their kind to `value_of` and `_kind_of` in ktft/lanes/ops/triton_codes.py"
    )


def _dtype(form: PackedFormat) -> torch.dtype:
    """As `value_of` takes codes: not every GPU has E4M3 itself."""
    return torch.uint8 if form.code_dtype == torch.float8_e4m3fn else form.code_dtype


def views(format: str, packed: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packed bytes as codes, as fp32 and, where the format has such scales, as bf16."""
    form = PACKED_FORMATS[format]
    halves = packed.view(torch.bfloat16) if form.group_scales == "bf16" else None
    return packed.view(_dtype(form)), packed.view(torch.float32), halves
