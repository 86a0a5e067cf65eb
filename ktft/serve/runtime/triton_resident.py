"""Few tokens through experts that are resident on a GPU, in Triton: products straight from packed bytes.

A program multiplies 16 rows of one matrix, a strip of tiles, by one token. Weights are read once for each pair of a
token and an expert: with so few tokens memory is the limit, and packed bytes are a quarter of bf16's. Sums are fp32 in
an order that does not change. The programs find out on the device which pairs are resident, and those of other pairs
leave at once, so that one CUDA graph serves any routing and any residents.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.ops.triton_codes import ROWS, columns, constants, groups, value_of, views
from ktft.lanes.ops.triton_launch import cdiv
from ktft.native.packed import PACKED_FORMATS, PackedMatrix
from ktft.serve.runtime.resident_experts import HotLayer

COLS = 256
LOW_COLS = 1024
"""Columns that a program of `_low_rank` takes at once: so few run that each iteration is a wait for memory."""
WARPS = 8
RANKS = 16
# What differs from call to call must not need a new kernel: none can be compiled while a graph is captured
UNSPECIALIZED = {
    "do_not_specialize": ("pairs", "experts", "top_k", "per_token", "first"),
    "do_not_specialize_on_alignment": ("index", "weights", "low", "of_token"),
}


@triton.jit(**UNSPECIALIZED)
def _route(
    index, table, slots, away, heat, pairs, experts,
    PAIRS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < pairs
    expert = tl.load(index + pair, mask=inside, other=-1)
    known = inside & (expert >= 0) & (expert < experts)
    slot = tl.load(table + expert, mask=known, other=-1)
    tl.store(slots + pair, slot, mask=inside)
    tl.store(away + pair, tl.where(slot >= 0, -1, expert), mask=inside)
    tl.atomic_add(heat + expert, tl.full((PAIRS,), 1, tl.int64), mask=known & (slot >= 0))


@triton.jit
def _plain(
    codes, floats, source, scales, row, x, cols,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """The product of 16 rows with whole-byte codes and x, without the rows' scales."""
    total = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(0, cols, COLS):
        value, col, here = columns(
            codes, floats, source, scales, row, first, cols, CODES, TABLE, UNIT, SCALES, TILE, COLS
        )
        total += value * tl.load(x + col, mask=here, other=0).to(tl.float32)
    return tl.sum(total, 1)


@triton.jit
def _nibbles(
    codes, halves, source, x, cols,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """The product of 16 rows with 4-bit codes and x, without the rows' scales."""
    total = tl.zeros((ROWS, COLS // 32, 16), tl.float32)
    for first in range(0, cols, COLS):
        code, factor, col, i, here = groups(codes, halves, source, first, cols, SCALES, TILE, COLS)
        code = code.to(tl.int32)
        low = tl.load(x + col + i, mask=here, other=0).to(tl.float32)
        high = tl.load(x + col + 16 + i, mask=here, other=0).to(tl.float32)
        total += factor * (
            value_of(code & 15, CODES, TABLE, UNIT) * low + value_of(code >> 4, CODES, TABLE, UNIT) * high
        )
    return tl.sum(tl.sum(total, 2), 1)


@triton.jit
def strip_product(
    codes, floats, halves, block, float_block, tiles, strip_codes, scales, biases, strip, x, cols,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    NIBBLES: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The product of 16 rows of a matrix and x, with scales and biases."""
    source = block + tiles + strip.to(tl.int64) * strip_codes
    if NIBBLES:
        y = _nibbles(codes, halves, source, x, cols, CODES, TABLE, UNIT, SCALES, TILE, COLS)
    else:
        y = _plain(
            codes, floats, source, float_block + scales, strip * 16, x, cols, CODES, TABLE, UNIT, SCALES, TILE, COLS
        )
    r = strip * 16 + tl.arange(0, 16)
    if SCALED:
        y *= tl.load(floats + float_block + scales + r)
    if BIASED:
        y += tl.load(floats + float_block + biases + r)
    return y


@triton.jit
def _lora(b, row, low, rank, width, RANKS: tl.constexpr):
    """The product of 16 rows of B, from `row` on, and A x."""
    r = (row + tl.arange(0, 16))[:, None] * width
    total = tl.zeros((16, RANKS), tl.float32)
    for first in range(0, rank, RANKS):
        j = first + tl.arange(0, RANKS)[None, :]
        weight = tl.load(b + r + j, mask=j < rank, other=0).to(tl.float32)
        total += weight * tl.load(low + j, mask=j < rank, other=0)
    return tl.sum(total, 1)


@triton.jit(**UNSPECIALIZED)
def _low_rank(
    x, x_row, per_token, slots, of_token, stacks, stack, places, offsets, ranks, first, out, width, cols, top_k,
    RANKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """out `[pairs, M, width]` = A x, for M projections whose A lie at `offsets` in the stack of the pair's slot."""
    pair = tl.program_id(0)
    slot = tl.load(slots + pair).to(tl.int64)
    place = tl.load(of_token + pair // top_k)
    which = tl.program_id(2)
    rank = tl.load(ranks + place * 3 + first + which, mask=place >= 0, other=0)
    row = tl.program_id(1) * RANKS
    if (slot >= 0) & (row < rank):
        a = stacks + (slot * places + place) * stack
        if len(offsets) == 2:
            a += tl.where(which == 0, offsets[0], offsets[1])
        else:
            a += offsets[0]
        j = (row + tl.arange(0, RANKS))[:, None]
        x += (pair // per_token).to(tl.int64) * x_row
        total = tl.zeros((RANKS, COLS), tl.float32)
        for begin in range(0, cols, COLS):
            col = begin + tl.arange(0, COLS)[None, :]
            weight = tl.load(a + j * cols + col, mask=(j < rank) & (col < cols), other=0).to(tl.float32)
            total += weight * tl.load(x + col, mask=col < cols, other=0).to(tl.float32)
        to = out + (pair.to(tl.int64) * len(offsets) + which) * width + row + tl.arange(0, RANKS)
        tl.store(to, tl.sum(total, 1), mask=row + tl.arange(0, RANKS) < width)


@triton.jit(**UNSPECIALIZED)
def _gate_up(
    hidden, top_k, slots, codes, floats, halves, block_codes, block_floats, begin, strip_codes,
    tiles, scales, biases, of_token, stacks, stack, places, b, ranks, low, width, out, intermediate, cols,
    alpha, limit, shift, cubic, gate_limit,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    NIBBLES: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, LORA: tl.constexpr, RANKS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    pair, strip = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + pair).to(tl.int64)
    if slot >= 0:
        x = hidden + (pair // top_k).to(tl.int64) * cols
        block, float_block = slot * block_codes, slot * block_floats
        gate = strip_product(
            codes, floats, halves, block, float_block, tiles[0], strip_codes, scales[0], biases[0], strip, x, cols,
            CODES, TABLE, UNIT, SCALES, TILE, NIBBLES, SCALED, BIASED, COLS,
        )  # fmt: skip
        up = strip_product(
            codes, floats, halves, block, float_block, tiles[1], strip_codes, scales[1], biases[1], strip, x, cols,
            CODES, TABLE, UNIT, SCALES, TILE, NIBBLES, SCALED, BIASED, COLS,
        )  # fmt: skip
        row = begin + strip * 16
        if LORA:
            place = tl.load(of_token + pair // top_k)
            if place >= 0:
                mine = stacks + (slot * places + place) * stack
                low += pair.to(tl.int64) * 2 * width
                gate += _lora(mine + b[0], row, low, tl.load(ranks + place * 3), width, RANKS)
                up += _lora(mine + b[1], row, low + width, tl.load(ranks + place * 3 + 1), width, RANKS)
        g = tl.minimum(gate, gate_limit)
        u = tl.minimum(tl.maximum(up, -limit), limit) + shift
        tl.store(
            out + pair.to(tl.int64) * intermediate + row + tl.arange(0, 16),
            g * tl.sigmoid((alpha + cubic * g * g) * g) * u,
        )


@triton.jit(**UNSPECIALIZED)
def _down(
    h, top_k, slots, weights, codes, floats, halves, block_codes, block_floats, begin, strip_codes,
    tiles, scales, biases, of_token, stacks, stack, places, b, ranks, low, width, out, intermediate, cols, rows,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    NIBBLES: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, LORA: tl.constexpr, ADDS: tl.constexpr,
    RANKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """The sum over a token's residents. With ADDS, what a further slice of their columns gives is added to out."""
    token, strip = tl.program_id(0).to(tl.int64), tl.program_id(1)
    to = out + token * rows + strip * 16 + tl.arange(0, 16)
    total = tl.zeros((16,), tl.float32)
    if LORA:
        place = tl.load(of_token + token)
    if ADDS:
        total = tl.load(to)
    for j in range(0, top_k):
        pair = token * top_k + j
        slot = tl.load(slots + pair).to(tl.int64)
        if slot >= 0:
            y = strip_product(
                codes, floats, halves, slot * block_codes, slot * block_floats, tiles[0], strip_codes, scales[0],
                biases[0], strip, h + pair * intermediate + begin, cols,
                CODES, TABLE, UNIT, SCALES, TILE, NIBBLES, SCALED, BIASED, COLS,
            )  # fmt: skip
            if LORA:  # noqa: SIM102  without it there is nothing to compile below
                if place >= 0:
                    mine = stacks + (slot * places + place) * stack + b[0]
                    y += _lora(mine, strip * 16, low + pair * width, tl.load(ranks + place * 3 + 2), width, RANKS)
            total += y * tl.load(weights + pair)
    tl.store(to, total)


def route(hot: HotLayer, top_k_index: Tensor) -> tuple[Tensor, Tensor]:
    """See `HotOperations`."""
    index = top_k_index.contiguous()
    blocks, away = torch.empty(index.shape, dtype=torch.int32, device=index.device), torch.empty_like(index)
    pairs = index.numel()
    _route[(cdiv(pairs, 256),)](index, hot.table, blocks, away, hot.heat, pairs, len(hot.table), PAIRS=256)
    return blocks, away


def forward(
    hot: HotLayer, hidden: Tensor, blocks: Tensor, top_k_weights: Tensor, of_token: Tensor | None = None
) -> Tensor:
    """See `HotOperations`."""
    hidden, top_k_weights = hidden.contiguous(), top_k_weights.contiguous()
    (tokens, cols), top_k, intermediate = hidden.shape, blocks.shape[1], hot.layer.intermediate_size
    swiglu, pairs = hot.layer.swiglu, blocks.numel()
    h = torch.empty(pairs, intermediate, dtype=torch.float32, device=hidden.device)
    out = torch.empty(hidden.shape, dtype=torch.float32, device=hidden.device)
    low = _low(hot, hidden, blocks, of_token, top_k, ("gate_proj", "up_proj"))
    for part, memory in hot.slices:
        gate, up = part.matrices["gate_proj"], part.matrices["up_proj"]
        _gate_up[(pairs, part.width // 16)](
            hidden, top_k, blocks, *_packed(hot, memory, part.begin, (gate, up)),
            *_adapters(hot, of_token, ("gate_proj", "up_proj"), low), h, intermediate, cols,
            swiglu.alpha, swiglu.limit, swiglu.shift, swiglu.cubic, swiglu.gate_most, **_constants(hot, gate),
            LORA=low is not None,
        )  # fmt: skip
    low = _low(hot, h, blocks, of_token, 1, ("down_proj",))
    for i, (part, memory) in enumerate(hot.slices):
        down = part.matrices["down_proj"]
        _down[(tokens, cols // 16)](
            h, top_k, blocks, top_k_weights, *_packed(hot, memory, part.begin, (down,)),
            *_adapters(hot, of_token, ("down_proj",), low), out, intermediate, part.width, cols,
            **_constants(hot, down), LORA=low is not None and i == 0, ADDS=i > 0,
        )  # fmt: skip
    return out


def _packed(hot: HotLayer, memory: Tensor, begin: int, matrices: tuple[PackedMatrix, ...]) -> tuple[Any, ...]:
    """A slice's blocks as the kernels take them: offsets count codes, and floats for scales and biases."""
    codes, floats, halves = views(hot.layer.format, memory)
    size = codes.element_size()
    return (
        codes, floats, halves, hot.block_bytes // size, hot.block_bytes // 4,
        begin, matrices[0].strip_bytes // size,
        tuple(matrix.tiles // size for matrix in matrices),
        tuple((matrix.scales or 0) // 4 for matrix in matrices),
        tuple((matrix.bias or 0) // 4 for matrix in matrices),
    )  # fmt: skip


def _constants(hot: HotLayer, matrix: PackedMatrix) -> dict[str, Any]:
    form = PACKED_FORMATS[hot.layer.format]
    return {
        **constants(hot.layer.format),
        "NIBBLES": bool(form.values),
        "SCALED": form.row_scaled,
        "BIASED": matrix.bias is not None,
        "RANKS": RANKS,
        "COLS": COLS,
        "num_warps": WARPS,
    }


def _low(
    hot: HotLayer, x: Tensor, blocks: Tensor, of_token: Tensor | None, per_token: int, names: tuple[str, ...]
) -> Tensor | None:
    """A x for the residents, fp32 `[pairs, projections, width]`; None where no token has an adapter."""
    if of_token is None or hot.stack is None or hot.stacks is None:
        return None
    pairs, width = blocks.numel(), hot.stack.width
    out = torch.empty(pairs, len(names), width, dtype=torch.float32, device=x.device)
    _low_rank[(pairs, width // RANKS, len(names))](
        x, x.shape[1], per_token, blocks, of_token, hot.stacks, hot.stacks.shape[2], hot.stacks.shape[1],
        tuple(hot.stack.a[name] for name in names), hot.ranks, 2 if names == ("down_proj",) else 0, out, width,
        x.shape[1], blocks.shape[1], RANKS=RANKS, COLS=LOW_COLS, num_warps=WARPS,
    )  # fmt: skip
    return out


def _adapters(hot: HotLayer, of_token: Tensor | None, names: tuple[str, ...], low: Tensor | None) -> tuple[Any, ...]:
    if low is None or hot.stack is None or hot.stacks is None:
        return None, None, 0, 0, tuple(0 for _ in names), None, None, 0
    places = tuple(hot.stack.b[name] for name in names)
    return of_token, hot.stacks, hot.stacks.shape[2], hot.stacks.shape[1], places, hot.ranks, low, hot.stack.width
