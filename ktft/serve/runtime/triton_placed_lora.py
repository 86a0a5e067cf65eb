"""LoRA of few tokens on a linear layer, each by its own adapter, in Triton.

A program reads the rows of its token's adapter alone. With so few tokens memory is the limit: all adapters for all
tokens would read many times as much.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.ops.triton_launch import cdiv
from ktft.serve.runtime.placed_lora import LoraStacks

RANKS = 16
COLS = 1024
"""Columns that a program takes at once. So few programs run that each iteration is a wait for memory."""
ROWS = 64
WARPS = 8


# What differs from call to call must not need a new kernel: none can be compiled while a graph is captured
@triton.jit(do_not_specialize_on_alignment=("x", "of_token"))
def _low_rank(
    x, of_token, ranks, a, low, parts, width, cols,
    RANKS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """low `[T, parts, width]` = A x"""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    place = tl.load(of_token + token).to(tl.int64)
    if place >= 0:
        rank = tl.load(ranks + place)
        row = tl.program_id(1) * RANKS
        if row < rank:
            j = row + tl.arange(0, RANKS)
            a += (place * parts + part) * width * cols
            total = tl.zeros((RANKS, COLS), tl.float32)
            for begin in range(0, cols, COLS):
                col = begin + tl.arange(0, COLS)[None, :]
                inside = (j < rank)[:, None] & (col < cols)
                weight = tl.load(a + j[:, None] * cols + col, mask=inside, other=0).to(tl.float32)
                total += weight * tl.load(x + token * cols + col, mask=col < cols, other=0).to(tl.float32)
            tl.store(low + (token * parts + part) * width + j, tl.sum(total, 1), mask=j < width)


@triton.jit(do_not_specialize_on_alignment=("of_token", "out"))
def _add(
    of_token, ranks, b, low, out, out_row, begins, width, rows,
    RANKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out `[T, rows]`, with rows at every `out_row`, += B low, where the rows of part i begin at `begins[i]`."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(of_token + token).to(tl.int64)
    if place >= 0:
        rank = tl.load(ranks + place)
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        part = tl.full((ROWS,), -1, tl.int64)
        for i in tl.static_range(len(begins)):
            part += (row >= begins[i]).to(tl.int64)
        from_b = b + (place * rows + row) * width
        from_low = low + (token * len(begins) + part) * width
        total = tl.zeros((ROWS, RANKS), tl.float32)
        for first in range(0, rank, RANKS):
            j = first + tl.arange(0, RANKS)[None, :]
            inside = (row < rows)[:, None] & (j < rank)
            weight = tl.load(from_b[:, None] + j, mask=inside, other=0).to(tl.float32)
            total += weight * tl.load(from_low[:, None] + j, mask=inside, other=0)
        to = out + token * out_row + row
        y = tl.load(to, mask=row < rows).to(tl.float32) + tl.sum(total, 1)
        tl.store(to, y.to(out.dtype.element_ty), mask=row < rows)


def add(stacks: LoraStacks, x: Tensor, out: Tensor, of_token: Tensor) -> None:
    """See `LoraOperations`."""
    x = x.contiguous()
    (_, parts, width, cols), rows, tokens = stacks.a.shape, out.shape[1], len(x)
    low = torch.empty(tokens, parts, width, dtype=torch.float32, device=x.device)
    begins: Any = stacks.slot.bounds[:-1]
    _low_rank[(tokens, width // RANKS, parts)](
        x, of_token, stacks.ranks, stacks.a, low, parts, width, cols, RANKS=RANKS, COLS=COLS, num_warps=WARPS
    )
    _add[(tokens, cdiv(rows, ROWS))](
        of_token, stacks.ranks, stacks.b, low, out, out.stride(0), begins, width, rows, RANKS=RANKS, ROWS=ROWS
    )
