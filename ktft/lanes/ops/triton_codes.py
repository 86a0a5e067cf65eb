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

from ktft.device import device_of
from ktft.lanes.ops.weights import PackedPart
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
def both_codes(code, scale, CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, ASM: tl.constexpr):
    """What the low and the high codes of bytes stand for, times their groups' fp32 scales, both rounded to bf16, as the
    products of experts take them. `ASM` is `assembly`'s.
    """
    if ASM != "":
        low, high = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r,r,r", [code, (scale * UNIT).to(tl.bfloat16)], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        code = code.to(tl.int32)
        low = (value_of(code & 15, CODES, TABLE, UNIT) * scale).to(tl.bfloat16)
        high = (value_of(code >> 4, CODES, TABLE, UNIT) * scale).to(tl.bfloat16)
    return low, high


@triton.jit
def block_of(
    expert, codes, floats, halves, block_codes, block_floats, slots, held_codes, held_floats, held_halves,
    held_block_codes, held_block_floats, SLOTTED: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """Codes, floats and halves of an expert's block, among those to which `packed_arguments` points."""
    slot = expert
    if SLOTTED:
        slot = tl.load(slots + expert).to(tl.int64)
        if slot >= 0:
            codes, floats, halves = held_codes, held_floats, held_halves
            block_codes, block_floats = held_block_codes, held_block_floats
        else:
            slot = -1 - slot
    if SCALES == "bf16":
        halves += slot * block_codes // 2
    return codes + slot * block_codes, floats + slot * block_floats, halves


@triton.jit
def group_scale(codes, halves, tile, at, here, SCALES: tl.constexpr):
    """The fp32 scales of groups, `at` being a group's number in its tile, which begins at `codes + tile`. None for
    `here` says that all exist.
    """
    place = halves + (tile + _CODE_BYTES) // 2 + at if SCALES == "bf16" else codes + tile + _CODE_BYTES + at
    stored = tl.load(place) if here is None else tl.load(place, mask=here, other=0)
    if SCALES == "power_of_two":  # 2^(stored - 127), of which the smallest is subnormal
        bits = stored.to(tl.int32)
        scale = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
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
    code = tl.load(codes + tile + r * _ROW_BYTES + group % _GROUPS * _HALF + i, mask=here, other=0)
    scale = group_scale(codes, halves, tile, r * _GROUPS + group % _GROUPS, here, SCALES)
    return code, scale, group * _GROUP, i, here


def packed_arguments(part: PackedPart) -> tuple[Any, ...]:
    """Where the blocks of experts lie, as `block_of` takes it."""

    def each(blocks: Tensor) -> tuple[Any, ...]:
        codes, floats, halves = views(part.format, blocks)
        return codes, floats, codes if halves is None else halves, codes.stride(0), floats.stride(0)

    return *each(part.blocks), part.slots, *each(part.blocks if part.held is None else part.held)


def offsets(part: PackedPart) -> tuple[tuple[int, ...], ...]:
    """Of each matrix in a block: its tiles, counted in codes; its scales and biases, counted in floats."""
    size = code_size(part.format)
    return (
        tuple(matrix.tiles // size for matrix in part.matrices),
        tuple((matrix.scales or 0) // 4 for matrix in part.matrices),
        tuple((matrix.bias or 0) // 4 for matrix in part.matrices),
    )


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


@functools.cache
def assembly(format: str, device: torch.device) -> str:
    """PTX for `both_codes`, of which the compiler's own instructions are three times as many; empty where a GPU or the
    format's codes lack it. Four bytes become the bf16 values of four low codes and of four high ones.

    A byte b below 128 under 0x43 is the bf16 number 128 + b. Permutations of bytes look eight magnitudes up at once;
    for a code whose highest bit is set they find 0, so that a code's magnitude less that of the code with the other
    sign is its value.
    """
    kind, table = _kind_of(PACKED_FORMATS[format])
    if not device_of(device).has_bf16_pairs():
        return ""
    if kind == "signed":
        values = f"""
        xor.b32 n, $4, 0x88888888; shr.u32 c1, $4, 16; shr.u32 n1, n, 16;
        mov.b32 t0, {table % 2**32:#x}; mov.b32 t1, {table >> 32:#x};
        prmt.b32 c0, t0, t1, $4; prmt.b32 c1, t0, t1, c1; prmt.b32 n0, t0, t1, n; prmt.b32 n1, t0, t1, n1;
        prmt.b32 v0, c0, k, 0x4240; prmt.b32 v1, c1, k, 0x4240; prmt.b32 v2, c0, k, 0x4341; prmt.b32 v3, c1, k, 0x4341;
        prmt.b32 m0, n0, k, 0x4240; prmt.b32 m1, n1, k, 0x4240; prmt.b32 m2, n0, k, 0x4341; prmt.b32 m3, n1, k, 0x4341;
        mov.b32 by, 0xBF80BF80;
        fma.rn.bf16x2 v0, m0, by, v0; fma.rn.bf16x2 v1, m1, by, v1;
        fma.rn.bf16x2 v2, m2, by, v2; fma.rn.bf16x2 v3, m3, by, v3;"""
    elif kind == "linear":
        less = int(torch.tensor(table - 128.0).bfloat16().view(torch.int16)) & 0xFFFF
        values = f"""
        and.b32 c0, $4, 0x0F0F0F0F; shr.u32 c1, $4, 4; and.b32 c1, c1, 0x0F0F0F0F;
        prmt.b32 v0, c0, k, 0x4140; prmt.b32 v1, c0, k, 0x4342; prmt.b32 v2, c1, k, 0x4140; prmt.b32 v3, c1, k, 0x4342;
        mov.b32 by, 0x3F803F80; mov.b32 n, {less << 16 | less:#x};
        fma.rn.bf16x2 v0, v0, by, n; fma.rn.bf16x2 v1, v1, by, n;
        fma.rn.bf16x2 v2, v2, by, n; fma.rn.bf16x2 v3, v3, by, n;"""
    else:
        return ""
    return f"""{{
        .reg .b32 k, by, zero, n, t0, t1, c0, c1, n0, n1, v0, v1, v2, v3, m0, m1, m2, m3;
        mov.b32 k, 0x43434343; mov.b32 zero, 0x80008000;{values}
        fma.rn.bf16x2 $0, v0, $5, zero; fma.rn.bf16x2 $1, v1, $6, zero;
        fma.rn.bf16x2 $2, v2, $5, zero; fma.rn.bf16x2 $3, v3, $6, zero;
    }}"""


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


def code_size(format: str) -> int:
    """Bytes of a code, or of two that share a byte."""
    return _dtype(PACKED_FORMATS[format]).itemsize


def views(format: str, packed: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Packed bytes as codes, as fp32 and, where the format has such scales, as bf16."""
    form = PACKED_FORMATS[format]
    halves = packed.view(torch.bfloat16) if form.group_scales == "bf16" else None
    return packed.view(_dtype(form)), packed.view(torch.float32), halves
