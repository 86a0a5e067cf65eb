"""A chunk of experts on a device, forward and backward: `ktft.reference.moe` in bf16 products with fp32 sums.

LoRA and biases go through the same products as the weights: see `ChunkWeights`. Backward computes gate and up again
from the hidden states, so nothing is kept after forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktft.lanes.ops.chunk_adapters import Adapters
from ktft.lanes.ops.decode import ChunkWeights
from ktft.lanes.ops.interface import Operations, operations
from ktft.lanes.ops.products import grouped
from ktft.lanes.ops.tiles import PLACES
from ktft.lanes.routes import ChunkRows, Piece
from ktft.lora import ExpertLora
from ktft.swiglu import Swiglu


class _Side:
    """One of a chunk's two matrices with its adapters: it turns inputs into outputs, and gradients back."""

    def __init__(
        self,
        matrix: Tensor,
        transposed: Tensor,
        a: Tensor | None,
        scale: Tensor | None,
        ones: Tensor | None,
        adapters: Adapters | None,
        ops: Operations,
    ) -> None:
        self.matrix, self.transposed, self.a, self.scale = matrix, transposed, a, scale
        self.ones, self.adapters, self.ops = ones, adapters, ops

    def rows(self, piece: Piece) -> Tensor:
        """Memory for inputs, with the columns behind them that LoRA and the biases need."""
        rows = torch.empty(piece.rows, self.matrix.shape[2], dtype=torch.bfloat16, device=self.matrix.device)
        if self.ones is not None:
            rows[:, -PLACES:] = self.ones
        return rows

    def add_places(self, x: Tensor, piece: Piece) -> None:
        """Write A x into the columns behind x."""
        if self.adapters is not None and self.a is not None:
            for begin, end, dropout in self.adapters.masked():
                self.ops.low_rank(x, self.a, piece, begin, end, dropout)

    def outputs(self, x: Tensor, piece: Piece) -> Tensor:
        """The outputs for x, whose columns behind the inputs are filled."""
        return grouped(x, self.transposed, piece)

    def input_grads(self, dy: Tensor, piece: Piece) -> Tensor:
        """Wᵀ dy + Aᵀ Bᵀ dy, with Bᵀ dy in the columns behind it."""
        dx = grouped(dy, self.matrix, piece)
        if self.adapters is not None and self.a is not None:
            for begin, end, dropout in self.adapters.masked():
                self.ops.add_low_rank(dx, self.a, piece, begin, end, dropout)
        return dx


class _Chunk:
    """What forward and backward of a chunk share."""

    def __init__(
        self, weights: ChunkWeights, lora: ExpertLora | None, hidden: Tensor, swiglu: Swiglu, ops: Operations | None
    ) -> None:
        self.hidden, self.swiglu = hidden, swiglu
        self.ops = ops = ops or operations(hidden.device)
        first, second = weights.adapters(lora)
        gate_up_t, down_t = weights.transposed
        ones = weights.ones
        self.gate_up = _Side(weights.gate_up, gate_up_t, weights.gate_up_a, weights.gate_up_scale, ones, first, ops)
        self.down = _Side(weights.down, down_t, weights.down_a, weights.down_scale, ones, second, ops)

    def gate_and_up(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Rows of x with the columns behind them, and gate and up before the activation."""
        x = self.gate_up.rows(piece)
        self.ops.gather(self.hidden, piece, None, x)
        self.gate_up.add_places(x, piece)
        return x, self.gate_up.outputs(x, piece)


def chunk_forward(
    weights: ChunkWeights,
    lora: ExpertLora | None,
    rows: ChunkRows,
    hidden: Tensor,
    top_k_weights: Tensor,
    swiglu: Swiglu,
    out: Tensor,
    ops: Operations | None = None,
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
    """
    if not rows:
        return
    chunk = _Chunk(weights, lora, hidden, swiglu, ops)
    for piece in rows:
        _, gate_up = chunk.gate_and_up(piece)
        h = chunk.down.rows(piece)
        chunk.ops.swiglu(gate_up, weights.gate_up_scale, piece, swiglu, h)
        chunk.down.add_places(h, piece)
        y = chunk.down.outputs(h, piece)
        chunk.ops.combine(y, weights.down_scale, piece, top_k_weights, out)


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
) -> list[Tensor]:
    """Add what these experts contribute to the gradients of hidden states and routing weights.

    Args:
        weights, lora, rows, hidden, top_k_weights, swiglu, ops: as in `chunk_forward`.
        grad_output: `[T, H]` fp32, bf16 or fp16, contiguous.
        grad_hidden: fp32 `[T, H]`, added to.
        grad_weights: fp32 `[T, k]`, added to for the routes of these experts.

    Returns:
        Gradients of a and b of each adapted projection, in the order of `PROJECTIONS`, fp32 `[G, ...]`. They are zero
        for an expert without rows.
    """
    parameters = lora.parameters() if lora is not None else []
    sizes = [parameter.numel() for parameter in parameters]
    # The first piece writes every element
    grads = (torch.empty if rows else torch.zeros)(sum(sizes), dtype=torch.float32, device=hidden.device)
    if rows:
        chunk = _Chunk(weights, lora, hidden, swiglu, ops)
        for piece in rows:
            adds = piece is not rows[0]
            _piece_backward(chunk, piece, top_k_weights, grad_output, grad_hidden, grad_weights, grads, adds)
    parts = zip(grads.split(sizes), parameters, strict=True) if sizes else ()
    return [grad.view(parameter.shape) for grad, parameter in parts]


def _piece_backward(
    chunk: _Chunk,
    piece: Piece,
    top_k_weights: Tensor,
    grad_output: Tensor,
    grad_hidden: Tensor,
    grad_weights: Tensor,
    grads: Tensor,
    adds: bool,
) -> None:
    ops, first, second = chunk.ops, chunk.gate_up, chunk.down
    x, gate_up = chunk.gate_and_up(piece)
    dy = torch.empty(piece.rows, grad_output.shape[1], dtype=torch.bfloat16, device=x.device)
    ops.gather(grad_output, piece, second.scale, dy)

    # dh lacks the routing weight, so that <dh, h> is the gradient of that weight
    dh = second.input_grads(dy, piece)
    h = second.rows(piece)
    bias = dh[:, -PLACES:] if second.ones is not None else None
    ops.swiglu_backward(gate_up, first.scale, dh, bias, piece, chunk.swiglu, top_k_weights, h, grad_weights)
    second.add_places(h, piece)

    dx = first.input_grads(gate_up, piece)
    ops.combine(dx, None, piece, None, grad_hidden)
    before = 0
    if first.adapters is not None:
        before = sum(tensor.numel() for tensor in first.adapters.tensors)
        ops.lora_gradients(first.adapters, x, dx, gate_up, piece, None, first.scale, grads[:before], adds)
    if second.adapters is not None:
        ops.lora_gradients(second.adapters, h, dh, dy, piece, top_k_weights, second.scale, grads[before:], adds)
