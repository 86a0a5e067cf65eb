"""A chunk of experts on a device, forward and backward: `ktft.reference.moe` in bf16 products with fp32 sums.

What LoRA and biases add goes through the same products as the weights: see `ChunkWeights`. Backward computes gate and
up again from the hidden states, so nothing is kept after forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lanes.decode import PLACES, ChunkWeights, split
from ktft.lanes.dropout import Dropout
from ktft.lanes.ops import Operations, operations
from ktft.lanes.products import grouped
from ktft.lanes.routes import ChunkRows, Piece
from ktft.lora import ExpertLora
from ktft.swiglu import Swiglu


@dataclass(frozen=True)
class _Inputs:
    """A's of projections that read the same input, as bf16 `[G, 2, places, inputs]`, with dropout's factor.

    `masked` are places that see the same mask: all of them where nothing is dropped, else one projection's each.
    """

    a: Tensor
    name: str
    masked: list[tuple[slice, Dropout | None]]

    @classmethod
    def of(cls, weights: ChunkWeights, lora: ExpertLora | None, names: tuple[str, ...]) -> _Inputs | None:
        pairs = {name: lora.pairs[name] for name in names if lora is not None and name in lora.pairs}
        if lora is None or not pairs:
            return None
        total = sum(weights.places[name] for name in pairs)
        first = next(iter(pairs.values())).a
        a = first.new_zeros((first.shape[0], 2, total, first.shape[2]), dtype=torch.bfloat16)
        for name, pair in pairs.items():
            parts = a[:, :, weights.places_of(name)][:, :, : pair.a.shape[1]]
            split(pair.a / (1 - lora.dropout), *parts.unbind(1))
        masked = [(weights.places_of(name), Dropout.of(lora, name)) for name in pairs]
        return cls(a, names[0], masked if lora.dropout else [(slice(0, total), None)])


class _Chunk:
    """What both passes share."""

    def __init__(
        self, weights: ChunkWeights, lora: ExpertLora | None, hidden: Tensor, swiglu: Swiglu, ops: Operations | None
    ) -> None:
        self.weights, self.lora, self.hidden, self.swiglu = weights, lora, hidden, swiglu
        self.ops = ops or operations(hidden.device)
        if lora is not None:
            weights.place_b(lora)
        self.gate_up = _Inputs.of(weights, lora, PROJECTIONS[:2])
        self.down = _Inputs.of(weights, lora, PROJECTIONS[2:])

    def rows(self, piece: Piece, matrices: Tensor) -> Tensor:
        """Room for a product's rows, with the columns that LoRA and the biases need at their end."""
        rows = torch.empty(piece.rows, matrices.shape[2], dtype=torch.bfloat16, device=self.hidden.device)
        if self.weights.biases:
            rows[:, -PLACES:] = 0
            rows[:, -PLACES : 2 - PLACES] = 1
        return rows

    def add_places(self, rows: Tensor, width: int, inputs: _Inputs | None, piece: Piece) -> None:
        """Write A x behind x."""
        if inputs is None:
            return
        out = self.weights.parts(rows, inputs.name)
        for places, dropout in inputs.masked:
            self.ops.low_rank(rows[:, :width], inputs.a[:, :, places], piece, dropout, out[..., places])

    def add_grad(self, grad: Tensor, width: int, inputs: _Inputs | None, piece: Piece) -> None:
        """Add Aᵀ Bᵀ dy to Wᵀ dy, where Bᵀ dy lies behind it."""
        if inputs is None:
            return
        low = self.weights.parts(grad, inputs.name)
        for places, dropout in inputs.masked:
            self.ops.add_low_rank(low[..., places], inputs.a[:, :, places], piece, dropout, grad[:, :width])

    def lora_gradients(
        self,
        name: str,
        grads: tuple[Tensor, Tensor],
        piece: Piece,
        x: Tensor,
        dy: Tensor,
        low_dy: Tensor,
        weights: Tensor | None,
    ) -> None:
        """Add to a projection's gradients: dy · (A x)ᵀ and Bᵀ dy · xᵀ.

        A x lies behind x, Bᵀ dy in the same columns of low_dy; both dy count times the routing weights, if given.
        """
        assert self.lora is not None
        lora, pair, places = self.lora, self.lora.pairs[name], self.weights.places_of(name)
        low_x, low = (self.weights.parts(rows, name)[..., places] for rows in (x, low_dy))
        scale = self.weights.scale_of(name)
        self.ops.lora_gradient(low_x[:, :1], dy, piece, weights, None, pair.scaling, scale, grads[1].mT)
        dropout, kept = Dropout.of(lora, name), 1 / (1 - lora.dropout)
        self.ops.lora_gradient(low, x[:, : pair.a.shape[2]], piece, weights, dropout, kept, None, grads[0])

    def gate_and_up(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """Rows of x with what lies behind them, and gate and up before the activation."""
        weights = self.weights
        x = self.rows(piece, weights.gate_up)
        self.ops.gather(self.hidden, piece, None, x[:, : weights.hidden])
        self.add_places(x, weights.hidden, self.gate_up, piece)
        return x, grouped(x, weights.gate_up.mT, piece)


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
    """Add these experts' part to the layer's output.

    Args:
        weights: decoded experts.
        lora: their adapters, `[G, ...]` on the device, of the ranks that `weights` were made for.
        rows: from `lay_out`, of the same experts in the same order.
        hidden: `[T, H]` fp32, bf16 or fp16, contiguous.
        top_k_weights: `[T, k]` fp32, contiguous.
        swiglu: the activation.
        out: fp32 `[T, H]`, added to.
        ops: by default the best for the device.
    """
    if not rows:
        return
    chunk = _Chunk(weights, lora, hidden, swiglu, ops)
    width = weights.intermediate
    for piece in rows:
        _, gate_up = chunk.gate_and_up(piece)
        h = chunk.rows(piece, weights.down)
        chunk.ops.swiglu(gate_up, weights.gate_up_scale, piece, swiglu, h[:, :width])
        chunk.add_places(h, width, chunk.down, piece)
        y = grouped(h, weights.down.mT, piece)
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
    """Add these experts' part to the gradients of hidden states and routing weights.

    Args:
        weights, lora, rows, hidden, top_k_weights, swiglu, ops: as `chunk_forward` took them.
        grad_output: `[T, H]` fp32, bf16 or fp16, contiguous.
        grad_hidden: fp32 `[T, H]`, added to.
        grad_weights: fp32 `[T, k]`, added to where a route belongs to these experts.

    Returns:
        Gradients of a and b of each adapted projection, in the order of `PROJECTIONS`, fp32 `[G, ...]`; zero for an
        expert without rows.
    """
    names = [name for name in PROJECTIONS if lora is not None and name in lora.pairs]
    pairs = [lora.pairs[name] for name in names] if lora is not None else []
    grads = {
        name: (torch.zeros_like(pair.a, dtype=torch.float32), torch.zeros_like(pair.b, dtype=torch.float32))
        for name, pair in zip(names, pairs, strict=True)
    }
    if rows:
        chunk = _Chunk(weights, lora, hidden, swiglu, ops)
        for piece in rows:
            _piece_backward(chunk, piece, top_k_weights, grad_output, grad_hidden, grad_weights, grads)
    return [grad for pair in grads.values() for grad in pair]


def _piece_backward(
    chunk: _Chunk,
    piece: Piece,
    top_k_weights: Tensor,
    grad_output: Tensor,
    grad_hidden: Tensor,
    grad_weights: Tensor,
    grads: dict[str, tuple[Tensor, Tensor]],
) -> None:
    ops, weights = chunk.ops, chunk.weights
    hidden, width = weights.hidden, weights.intermediate
    x, gate_up = chunk.gate_and_up(piece)
    dy = torch.empty(piece.rows, hidden, dtype=torch.bfloat16, device=x.device)
    ops.gather(grad_output, piece, weights.down_scale, dy)

    # Without the routing weight, so that <dh, h> is that one's gradient
    dh = grouped(dy, weights.down, piece)
    chunk.add_grad(dh, width, chunk.down, piece)
    h = chunk.rows(piece, weights.down)
    bias = dh[:, -PLACES:] if weights.biases else None
    ops.swiglu_backward(
        gate_up,
        weights.gate_up_scale,
        dh[:, :width],
        bias,
        piece,
        chunk.swiglu,
        top_k_weights,
        h[:, :width],
        grad_weights,
    )
    chunk.add_places(h, width, chunk.down, piece)

    dx = grouped(gate_up, weights.gate_up, piece)
    chunk.add_grad(dx, hidden, chunk.gate_up, piece)
    ops.combine(dx[:, :hidden], None, piece, None, grad_hidden)
    for name, grad in grads.items():
        if name == "down_proj":
            chunk.lora_gradients(name, grad, piece, h, dy, dh, top_k_weights)
        else:
            at = PROJECTIONS.index(name) * width
            chunk.lora_gradients(name, grad, piece, x, gate_up[:, at : at + width], dx, None)
