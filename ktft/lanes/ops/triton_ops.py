"""`interface.Operations` in Triton. Operations on rows are here; those on weights and LoRA have their own files."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.ops.interface import KeptGates
from ktft.lanes.ops.triton_decode import decode, decode_matrix  # noqa: F401
from ktft.lanes.ops.triton_launch import cdiv, power_of_2, short
from ktft.lanes.ops.triton_lora import add_low_rank, lora_gradients, low_rank, place  # noqa: F401
from ktft.lanes.ops.triton_products import input_grads, outputs, reads_packed  # noqa: F401
from ktft.lanes.ops.triton_routes import find_bad, sort_routes  # noqa: F401
from ktft.lanes.routes import Piece
from ktft.swiglu import Swiglu

COLS = 1024
WIDE = 4096
"""The most columns of a row that one program copies. Of a piece that may have many more rows than it has, most programs
have nothing to do but end, which takes the longer the more of them there are.
"""
# Triton must not compile a new kernel for what changes from call to call
UNSPECIALIZED = {
    "do_not_specialize": ("experts", "begin", "rows"),
    "do_not_specialize_on_alignment": ("ends", "routes"),
}


@triton.jit
def _expert(ends, row, experts, EXPERTS: tl.constexpr):
    """The expert of one row, or of each of some rows `[n, 1]`."""
    g = tl.arange(0, EXPERTS)
    end = tl.load(ends + g, mask=g < experts, other=0x7FFFFFFF)
    return tl.sum((end <= row).to(tl.int32), 0).to(tl.int64)


@short
@triton.jit(**UNSPECIALIZED)
def _gather(
    source, out, out_row, scale, ends, routes, top_k, experts, cols,
    SCALED: tl.constexpr, EXPERTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(ends + experts - 1):
        return
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    token = (tl.load(routes + row) // top_k).to(tl.int64)
    value = tl.load(source + token * cols + col, mask=col < cols, other=0).to(tl.float32)
    if SCALED:
        value *= tl.load(scale + _expert(ends, row, experts, EXPERTS) * cols + col, mask=col < cols, other=0)
    tl.store(out + row.to(tl.int64) * out_row + col, value.to(tl.bfloat16), mask=col < cols)


@triton.jit
def _kept_row(kept, route, cols):
    """Where gate and up of a route are kept: `kept` points to the address of the first."""
    rows = tl.load(kept).to(tl.pointer_type(tl.bfloat16))
    return tl.multiple_of(rows, 16) + route.to(tl.int64) * cols


@triton.jit
def _keep(gate_up, kept, row, routes, MATRICES: tl.constexpr, col, width):
    """Keep some columns of a row of gate_up, of each of its matrices."""
    source = gate_up + row.to(tl.int64) * MATRICES * width
    to = _kept_row(kept, tl.load(routes + row), MATRICES * width)
    for which in tl.static_range(MATRICES):
        values = tl.load(source + which * width + col, mask=col < width, other=0)
        tl.store(to + which * width + col, values, mask=col < width)


@triton.jit
def _load_pair(gate_up, scale, expert, col, width, SCALED: tl.constexpr):
    """Gate and up of one row, times their scales, in fp32; and these scales."""
    gate = tl.load(gate_up + col, mask=col < width, other=0).to(tl.float32)
    up = tl.load(gate_up + width + col, mask=col < width, other=0).to(tl.float32)
    if SCALED:
        gate_scale = tl.load(scale + expert * 2 * width + col, mask=col < width, other=0)
        up_scale = tl.load(scale + expert * 2 * width + width + col, mask=col < width, other=0)
    else:
        gate_scale, up_scale = 1.0, 1.0
    return gate * gate_scale, up * up_scale, gate_scale, up_scale


@short
@triton.jit(**UNSPECIALIZED)
def _swiglu(
    gate_up, out, out_row, scale, kept, ends, routes, experts, width, alpha, limit, shift, cubic, gate_limit,
    SCALED: tl.constexpr, KEPT: tl.constexpr, EXPERTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(ends + experts - 1):
        return
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    if KEPT:
        _keep(gate_up, kept, row, routes, 2, col, width)
    expert = _expert(ends, row, experts, EXPERTS)
    gate, up, _, _ = _load_pair(gate_up + row.to(tl.int64) * 2 * width, scale, expert, col, width, SCALED)
    gate = tl.minimum(gate, gate_limit)
    up = tl.minimum(tl.maximum(up, -limit), limit) + shift
    h = gate * tl.sigmoid((alpha + cubic * gate * gate) * gate) * up
    tl.store(out + row.to(tl.int64) * out_row + col, h.to(tl.bfloat16), mask=col < width)


@triton.jit
def _load_up(up, scale, expert, col, width, SCALED: tl.constexpr):
    """max(up, 0) of one row, times its scale, in fp32; and this scale."""
    value = tl.load(up + col, mask=col < width, other=0).to(tl.float32)
    own = tl.load(scale + expert * width + col, mask=col < width, other=0) if SCALED else 1.0
    return tl.maximum(value * own, 0), own


@short
@triton.jit(**UNSPECIALIZED)
def _relu2(
    up, out, out_row, scale, kept, ends, routes, experts, width,
    SCALED: tl.constexpr, KEPT: tl.constexpr, EXPERTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(ends + experts - 1):
        return
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    if KEPT:
        _keep(up, kept, row, routes, 1, col, width)
    expert = _expert(ends, row, experts, EXPERTS)
    u, _ = _load_up(up + row.to(tl.int64) * width, scale, expert, col, width, SCALED)
    tl.store(out + row.to(tl.int64) * out_row + col, (u * u).to(tl.bfloat16), mask=col < width)


@short
@triton.jit(**UNSPECIALIZED)
def _relu2_backward(
    up, grad_h, grad_row, more, out, out_row, weights, grad_weights, scale, kept, ends, routes, experts, width,
    MORE: tl.constexpr, SCALED: tl.constexpr, KEPT: tl.constexpr, EXPERTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(ends + experts - 1):
        return
    expert = _expert(ends, row, experts, EXPERTS)
    route = tl.load(routes + row)
    weight = 2 * tl.load(weights + route)
    row = row.to(tl.int64)
    up += row * width
    source = up
    if KEPT:
        source = _kept_row(kept, route, width)
    dots = tl.zeros((COLS,), tl.float32)
    for c in range(0, width, COLS):
        col = c + tl.arange(0, COLS)
        inside = col < width
        u, own = _load_up(source, scale, expert, col, width, SCALED)
        grad = tl.load(grad_h + row * grad_row + col, mask=inside, other=0).to(tl.float32)
        dots += grad * u * u
        tl.store(up + col, (grad * weight * u * own).to(tl.bfloat16), mask=inside)
        tl.store(out + row * out_row + col, (u * u).to(tl.bfloat16), mask=inside)
    dot = tl.sum(dots, 0)
    if MORE:
        dot += tl.load(more + row * grad_row).to(tl.float32) + tl.load(more + row * grad_row + 1).to(tl.float32)
    tl.store(grad_weights + route, tl.load(grad_weights + route) + dot)


@short
@triton.jit(**UNSPECIALIZED)
def _swiglu_backward(
    gate_up, grad_h, grad_row, more, out, out_row, weights, grad_weights, scale, kept, ends, routes,
    experts, width, alpha, limit, shift, cubic, gate_limit,
    MORE: tl.constexpr, SCALED: tl.constexpr, KEPT: tl.constexpr, EXPERTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row >= tl.load(ends + experts - 1):
        return
    expert = _expert(ends, row, experts, EXPERTS)
    route = tl.load(routes + row)
    weight = tl.load(weights + route)
    row = row.to(tl.int64)
    gate_up += row * 2 * width
    source = gate_up
    if KEPT:
        source = _kept_row(kept, route, 2 * width)
    dots = tl.zeros((COLS,), tl.float32)
    for c in range(0, width, COLS):
        col = c + tl.arange(0, COLS)
        inside = col < width
        gate, up, gate_scale, up_scale = _load_pair(source, scale, expert, col, width, SCALED)
        grad = tl.load(grad_h + row * grad_row + col, mask=inside, other=0).to(tl.float32)
        g = tl.minimum(gate, gate_limit)
        u = tl.minimum(tl.maximum(up, -limit), limit) + shift
        s = tl.sigmoid((alpha + cubic * g * g) * g)
        h = g * s * u
        dots += grad * h
        grad *= weight
        # (g sigmoid(z))' = s + z' g s (1 - s)
        slope = s + (alpha + 3 * cubic * g * g) * g * s * (1 - s)
        grad_gate = tl.where(gate <= gate_limit, grad * u * slope * gate_scale, 0)
        grad_up = tl.where(tl.abs(up) <= limit, grad * g * s * up_scale, 0)
        tl.store(gate_up + col, grad_gate.to(tl.bfloat16), mask=inside)
        tl.store(gate_up + width + col, grad_up.to(tl.bfloat16), mask=inside)
        tl.store(out + row * out_row + col, h.to(tl.bfloat16), mask=inside)
    dot = tl.sum(dots, 0)
    if MORE:
        dot += tl.load(more + row * grad_row).to(tl.float32) + tl.load(more + row * grad_row + 1).to(tl.float32)
    tl.store(grad_weights + route, tl.load(grad_weights + route) + dot)


@short
@triton.jit(**UNSPECIALIZED)
def _combine(
    y, y_row, out, weights, scale, ends, route_row, top_k, begin, rows, experts, cols,
    WEIGHTED: tl.constexpr, SCALED: tl.constexpr, EXPERTS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    if tl.load(ends + experts - 1) == 0:
        return
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    total = tl.zeros((COLS,), tl.float32)
    found = 0
    for slot in range(0, top_k):
        route = token * top_k + slot
        row = tl.load(route_row + route) - begin
        if (row >= 0) & (row < rows):
            value = tl.load(y + row.to(tl.int64) * y_row + col, mask=col < cols, other=0).to(tl.float32)
            if SCALED:
                value *= tl.load(scale + _expert(ends, row, experts, EXPERTS) * cols + col, mask=col < cols, other=0)
            if WEIGHTED:
                value *= tl.load(weights + route)
            total += value
            found += 1
    if found > 0:
        to = out + token * cols + col
        tl.store(to, tl.load(to, mask=col < cols, other=0) + total, mask=col < cols)


def _warps(cols: int) -> int:
    """For a program that reads so many columns of a row."""
    return 8 if cols > COLS else 4


def _experts(piece: Piece) -> int:
    return max(32, power_of_2(piece.experts))


def gather(source: Tensor, piece: Piece, scale: Tensor | None, out: Tensor) -> None:
    cols, experts = source.shape[1], piece.experts
    across = min(WIDE, power_of_2(cols))
    _gather[(piece.rows, cdiv(cols, across))](
        source, out, out.stride(0), scale, piece.ends, piece.row_route, piece.top_k, experts, cols,
        SCALED=scale is not None, EXPERTS=_experts(piece), COLS=across, num_warps=_warps(across),
    )  # fmt: skip


def swiglu(
    gate_up: Tensor,
    scale: Tensor | None,
    piece: Piece,
    swiglu: Swiglu,
    out: Tensor,
    kept: KeptGates | None = None,
) -> None:
    address = kept.address if kept is not None else None
    if not swiglu.gated:
        width = gate_up.shape[1]
        _relu2[(piece.rows, cdiv(width, COLS))](
            gate_up, out, out.stride(0), scale, address, piece.ends, piece.row_route, piece.experts, width,
            SCALED=scale is not None, KEPT=kept is not None, EXPERTS=_experts(piece), COLS=COLS,
        )  # fmt: skip
        return
    width = gate_up.shape[1] // 2
    across = min(2 * COLS, power_of_2(width))
    _swiglu[(piece.rows, cdiv(width, across))](
        gate_up, out, out.stride(0), scale, address, piece.ends, piece.row_route, piece.experts, width,
        swiglu.alpha, swiglu.limit, swiglu.shift, swiglu.cubic, swiglu.gate_most,
        SCALED=scale is not None, KEPT=kept is not None, EXPERTS=_experts(piece), COLS=across, num_warps=_warps(across),
    )  # fmt: skip


def swiglu_backward(
    gate_up: Tensor,
    scale: Tensor | None,
    grad_h: Tensor,
    more: Tensor | None,
    piece: Piece,
    swiglu: Swiglu,
    weights: Tensor,
    h: Tensor,
    grad_weights: Tensor,
    kept: KeptGates | None = None,
) -> None:
    address = kept.address if kept is not None else None
    if not swiglu.gated:
        _relu2_backward[(piece.rows,)](
            gate_up, grad_h, grad_h.stride(0), more, h, h.stride(0), weights, grad_weights, scale,
            address, piece.ends, piece.row_route, piece.experts, gate_up.shape[1],
            MORE=more is not None, SCALED=scale is not None, KEPT=kept is not None, EXPERTS=_experts(piece), COLS=COLS,
        )  # fmt: skip
        return
    _swiglu_backward[(piece.rows,)](
        gate_up, grad_h, grad_h.stride(0), more, h, h.stride(0), weights, grad_weights, scale,
        address, piece.ends, piece.row_route, piece.experts, gate_up.shape[1] // 2,
        swiglu.alpha, swiglu.limit, swiglu.shift, swiglu.cubic, swiglu.gate_most,
        MORE=more is not None, SCALED=scale is not None, KEPT=kept is not None, EXPERTS=_experts(piece), COLS=COLS,
    )  # fmt: skip


def combine(y: Tensor, scale: Tensor | None, piece: Piece, weights: Tensor | None, out: Tensor) -> None:
    cols = out.shape[1]
    _combine[(out.shape[0], cdiv(cols, COLS))](
        y, y.stride(0), out, weights, scale, piece.ends, piece.route_row, piece.top_k, piece.begin, piece.rows,
        piece.experts, cols,
        WEIGHTED=weights is not None, SCALED=scale is not None, EXPERTS=_experts(piece), COLS=COLS,
    )  # fmt: skip
