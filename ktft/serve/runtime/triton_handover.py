"""Calls with few tokens to and from the CPU's experts, in Triton.

A kernel divides the routing, as `HotOperations.route` does, and writes what the CPU needs straight to host memory;
another adds what the CPU wrote there to the part of the residents. In place of four copies and the kernels around them
that takes a layer 25 microseconds less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.ops.triton_launch import cdiv, power_of_2
from ktft.native import ELSEWHERE
from ktft.native.hybrid import CallPlace
from ktft.serve.runtime.resident_experts import HotLayer

_ELSEWHERE = tl.constexpr(ELSEWHERE)
BLOCK = 1024


# What differs from call to call must not need a new kernel: none can be compiled while a graph is captured
@triton.jit(do_not_specialize_on_alignment=("hidden", "index", "weights", "of_token"))
def _send(
    hidden, index, weights, of_token, table, slots, heat, to_hidden, to_index, to_weights, to_of_token, experts, top_k,
    cols,
    RESIDENTS: tl.constexpr, ADAPTERS: tl.constexpr, ROUTES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(hidden + token * cols + col, mask=col < cols)
    tl.store(to_hidden + token * cols + col, value, mask=col < cols)
    if tl.program_id(1) == 0:
        if ADAPTERS:
            tl.store(to_of_token + token, tl.load(of_token + token))
        pair = token * top_k + tl.arange(0, ROUTES)
        inside = tl.arange(0, ROUTES) < top_k
        expert = tl.load(index + pair, mask=inside, other=_ELSEWHERE)
        tl.store(to_weights + pair, tl.load(weights + pair, mask=inside), mask=inside)
        if RESIDENTS:
            known = inside & (expert >= 0) & (expert < experts)
            slot = tl.load(table + expert, mask=known, other=-1)
            tl.store(slots + pair, slot, mask=inside)
            tl.atomic_add(heat + expert, tl.full((ROUTES,), 1, tl.int64), mask=known & (slot >= 0))
            expert = tl.where(slot >= 0, _ELSEWHERE, expert)
        tl.store(to_index + pair, expert, mask=inside)


@triton.jit
def _receive(part, sent, out, count, ADDS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # No cache may keep what was here before
    total = tl.load(sent + at, mask=at < count, cache_modifier=".cv").to(tl.float32)
    if ADDS:
        total += tl.load(part + at, mask=at < count)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)


def send(
    hot: HotLayer | None,
    place: CallPlace,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    of_token: Tensor | None = None,
) -> Tensor | None:
    """Write a call's inputs to the CPU's memory, with `ELSEWHERE` in place of residents, and count the residents' heat.

    Args:
        hot: the layer's residents, if it has any.
        hidden, index, weights: `[T, H]`, `[T, k]` and fp32 `[T, k]`, contiguous.
        of_token: `[T]` int32: the place of each token's adapter, -1 for none. Without it no place is written.

    Returns:
        The blocks of the residents, as `HotOperations.route` does.
    """
    (tokens, cols), top_k = hidden.shape, index.shape[1]
    blocks = None if hot is None else torch.empty(index.shape, dtype=torch.int32, device=index.device)
    table, heat, experts = (None, None, 0) if hot is None else (hot.table, hot.heat, len(hot.table))
    _send[(tokens, cdiv(cols, BLOCK))](
        hidden, index, weights, of_token, table, blocks, heat, place.hidden, place.index.view(index.dtype),
        place.weights, place.of_token, experts, top_k, cols,
        RESIDENTS=hot is not None, ADAPTERS=of_token is not None, ROUTES=power_of_2(top_k), BLOCK=BLOCK,
    )  # fmt: skip
    return blocks


def receive(place: CallPlace, part: Tensor | None, hidden: Tensor) -> Tensor:
    """The output, like `hidden` `[T, H]`: what the CPU computed, plus the residents' part, fp32, if there is one."""
    out = torch.empty_like(hidden)
    count = out.numel()
    _receive[(cdiv(count, BLOCK),)](part, place.out, out, count, ADDS=part is not None, BLOCK=BLOCK)
    return out
