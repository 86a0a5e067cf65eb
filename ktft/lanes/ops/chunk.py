"""A chunk of experts on a device, decoded, forward and backward: `ktft.reference.moe` in bf16 products with fp32 sums.

LoRA and biases go through the same products as the weights: see `ChunkMatrix`. Backward computes gate and up again
from the hidden states, unless forward kept them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from ktft.device import device_of
from ktft.lanes.ops.interface import KeptGates, Operations, operations
from ktft.lanes.ops.weights import PLACES, Adapters, ChunkMatrix, ChunkWeights, PackedExperts
from ktft.lanes.routes import ChunkRows, Piece
from ktft.lora import ExpertLora
from ktft.swiglu import Swiglu


def decode(packed: PackedExperts, out: ChunkWeights, ops: Operations | None = None) -> None:
    """Decode packed experts, exactly: bf16 holds what the formats' values are without their rows' scales.

    Args:
        packed: G experts on the device of `out`.
        out: of G experts. If it has `packed`, no values are decoded, but scales and biases alone.
        ops: by default the best for the device.
    """
    ops = ops or operations(out.down.values.device)
    for matrix in (out.gate_up, out.down):
        for part in packed.parts(matrix):
            ops.decode(part, matrix, out.packed is None)


def place(lora: ExpertLora | None, out: ChunkWeights, ops: Operations | None = None) -> None:
    """Write adapters beside the decoded weights, whose scales must be there.

    Args:
        lora: of the G experts, `[G, ...]` on the device of `out`, of the ranks that `out` was made for.
        out: of G experts.
        ops: by default the best for the device.
    """
    ops = ops or operations(out.down.values.device)
    for matrix in (out.gate_up, out.down):
        if (adapters := matrix.adapters(lora)) is not None:
            ops.place(adapters)


@functools.cache
def is_grouped(device: torch.device) -> bool:
    """Whether torch has kernels for groups on the device. Without them its own loop would wait for the device."""
    return device_of(device).has_grouped_mm()


def grouped(x: Tensor, matrices: Tensor, piece: Piece) -> Tensor:
    """`[n, N]` bf16: each row of x `[n, K]` times the matrix of its expert in `[G, K, N]`, bf16, summed in fp32.

    Rows of x, and either rows or columns of the matrices, must be contiguous and begin at multiples of 16 bytes.
    """
    if is_grouped(x.device):
        out: Tensor = torch._grouped_mm(x, matrices, offs=piece.ends)
        return out
    out = x.new_empty(x.shape[0], matrices.shape[2])
    for expert, rows in piece.ranges():
        torch.mm(x[rows], matrices[expert], out=out[rows])
    return out


@dataclass(frozen=True)
class _Side:
    """One of a chunk's two matrices with its adapters: it turns inputs into outputs, and gradients back."""

    matrix: ChunkMatrix
    adapters: Adapters | None
    ops: Operations
    packed: PackedExperts | None

    def rows(self, piece: Piece) -> Tensor:
        """Memory for inputs, with the columns behind them that LoRA and the biases need."""
        values, ones = self.matrix.values, self.matrix.ones
        rows = values.new_empty(piece.rows, values.shape[2])
        if ones is not None:
            rows[:, -PLACES:] = ones
        return rows

    def add_places(self, x: Tensor, piece: Piece) -> None:
        """Write A x into the columns behind x."""
        if self.adapters is not None:
            for begin, end, dropout in self.adapters.masked():
                self.ops.low_rank(x, self.adapters.a, piece, begin, end, dropout)

    def outputs(self, x: Tensor, piece: Piece) -> Tensor:
        """The outputs for x, with A x written behind it."""
        self.add_places(x, piece)
        if self.packed is not None:
            return self.ops.outputs(x, self.matrix, self.packed, piece)
        return grouped(x, self.matrix.transposed, piece)

    def input_grads(self, dy: Tensor, piece: Piece) -> Tensor:
        """Wᵀ dy + Aᵀ Bᵀ dy, with Bᵀ dy in the columns behind it."""
        if self.packed is not None:
            dx = self.ops.input_grads(dy, self.matrix, self.packed, piece)
        else:
            dx = grouped(dy, self.matrix.values, piece)
        if self.adapters is not None:
            for begin, end, dropout in self.adapters.masked():
                self.ops.add_low_rank(dx, self.adapters.a, piece, begin, end, dropout)
        return dx


def _sides(weights: ChunkWeights, lora: ExpertLora | None, ops: Operations | None) -> tuple[_Side, _Side]:
    ops = ops or operations(weights.down.values.device)
    first, second = (_Side(each, each.adapters(lora), ops, weights.packed) for each in (weights.gate_up, weights.down))
    return first, second


def _inputs(side: _Side, hidden: Tensor, piece: Piece) -> Tensor:
    """Rows of x, and memory for the columns behind them."""
    x = side.rows(piece)
    side.ops.gather(hidden, piece, None, x)
    return x


def chunk_forward(
    weights: ChunkWeights,
    lora: ExpertLora | None,
    rows: ChunkRows,
    hidden: Tensor,
    top_k_weights: Tensor,
    swiglu: Swiglu,
    out: Tensor,
    ops: Operations | None = None,
    kept: KeptGates | None = None,
) -> None:
    """Add what these experts contribute to the layer's output.

    Args:
        weights: decoded experts, with their adapters written beside them by `place`.
        lora: the same adapters, `[G, ...]`, for their shapes, scaling and dropout.
        rows: what `lay_out` gives for the same experts in the same order.
        hidden: `[T, H]` fp32, bf16 or fp16, contiguous.
        top_k_weights: `[T, k]` fp32, contiguous.
        swiglu: the activation.
        out: fp32 `[T, H]`, added to.
        ops: None for the best implementation on the device.
        kept: receives gate and up before the activation; None if backward computes them again.
    """
    first, second = _sides(weights, lora, ops)
    for piece in rows:
        gate_up = first.outputs(_inputs(first, hidden, piece), piece)
        h = second.rows(piece)
        first.ops.swiglu(gate_up, weights.gate_up.scale, piece, swiglu, h, kept)
        y = second.outputs(h, piece)
        second.ops.combine(y, weights.down.scale, piece, top_k_weights, out)


def chunk_backward(
    weights: ChunkWeights,
    lora: ExpertLora | None,
    rows: ChunkRows,
    hidden: Tensor,
    top_k_weights: Tensor,
    swiglu: Swiglu,
    grad_output: Tensor,
    grad_hidden: Tensor,
    grad_weights: Tensor,
    ops: Operations | None = None,
    lora_grads: Tensor | None = None,
    kept: KeptGates | None = None,
) -> list[Tensor]:
    """Add what these experts contribute to the gradients of hidden states and routing weights.

    Args:
        weights, lora, rows, hidden, top_k_weights, swiglu, ops: as in `chunk_forward`.
        grad_output: `[T, H]` fp32, bf16 or fp16, contiguous.
        grad_hidden: fp32 `[T, H]`, added to.
        grad_weights: fp32 `[T, k]`, added to for the routes of these experts.
        lora_grads: memory for what is returned, one after the other; None for new memory.
        kept: what forward kept; None if it kept nothing.

    Returns:
        Gradients of a and b of each adapted projection, in the order of `PROJECTIONS`, fp32 `[G, ...]`. They are zero
        for an expert without rows.
    """
    parameters = lora.parameters() if lora is not None else []
    sizes = [parameter.numel() for parameter in parameters]
    grads = lora_grads
    if grads is None:  # the first piece writes every element
        grads = (torch.empty if rows else torch.zeros)(sum(sizes), dtype=torch.float32, device=hidden.device)
    first, second = _sides(weights, lora, ops)
    ops, first_scale, second_scale = first.ops, weights.gate_up.scale, weights.down.scale
    of_first = first.adapters.parameters if first.adapters is not None else 0
    for piece in rows:
        x = _inputs(first, hidden, piece)
        if kept is None:
            gate_up = first.outputs(x, piece)
        else:
            first.add_places(x, piece)
            gate_up = x.new_empty(piece.rows, kept.rows.shape[1])
        dy = x.new_empty(piece.rows, grad_output.shape[1])
        ops.gather(grad_output, piece, second_scale, dy)

        # dh lacks the routing weight, so that <dh, h> is the gradient of that weight
        dh = second.input_grads(dy, piece)
        h = second.rows(piece)
        bias = dh[:, -PLACES:] if weights.down.biases else None
        ops.swiglu_backward(gate_up, first_scale, dh, bias, piece, swiglu, top_k_weights, h, grad_weights, kept)
        second.add_places(h, piece)

        dx = first.input_grads(gate_up, piece)
        ops.combine(dx, None, piece, None, grad_hidden)
        adds = piece is not rows[0]
        if first.adapters is not None:
            ops.lora_gradients(first.adapters, x, dx, gate_up, piece, None, grads[:of_first], adds)
        if second.adapters is not None:
            ops.lora_gradients(second.adapters, h, dh, dy, piece, top_k_weights, grads[of_first:], adds)
    parts = zip(grads.split(sizes), parameters, strict=True) if sizes else ()
    return [grad.view(parameter.shape) for grad, parameter in parts]
