"""`HotOperations` in torch operations, for any device. It goes pair by pair, so it is not fast."""

from __future__ import annotations

import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lanes.ops import torch_ops
from ktft.lanes.ops.chunk import decode
from ktft.lanes.ops.weights import ChunkMatrix, ChunkWeights, PackedExperts
from ktft.native import ELSEWHERE
from ktft.serve.runtime.resident_experts import HotLayer


def route(hot: HotLayer, top_k_index: Tensor) -> tuple[Tensor, Tensor]:
    """See `HotOperations`."""
    known = (top_k_index >= 0) & (top_k_index < len(hot.table))
    expert = top_k_index.where(known, 0).long()
    blocks = hot.table[expert].where(known, -1)
    here = blocks >= 0
    hot.heat.scatter_add_(0, expert.flatten(), here.flatten().long())
    return blocks, top_k_index.masked_fill(here, ELSEWHERE)


def forward(
    hot: HotLayer, hidden: Tensor, blocks: Tensor, top_k_weights: Tensor, of_token: Tensor | None = None
) -> Tensor:
    """See `HotOperations`."""
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    weights = ChunkWeights.empty(hot.layer, 1, None, hidden.device)
    here = blocks >= 0
    for token in range(blocks.shape[0]):
        for j in range(blocks.shape[1]):
            block = blocks[token, j].clamp(min=0).long()
            place = None if of_token is None else of_token[token]
            y = _expert(hot, weights, hidden[token].float(), block, place)
            out[token] += torch.where(here[token, j], y * top_k_weights[token, j], 0)
    return out


def _expert(hot: HotLayer, weights: ChunkWeights, x: Tensor, block: Tensor, place: Tensor | None) -> Tensor:
    """The output of one resident for one token, whose adapter has this place."""
    count = hot.slices[0][1].numel() // hot.block_bytes
    packed = [
        bytes_.as_strided((count, part.expert_bytes), (hot.block_bytes, 1))[block][None] for part, bytes_ in hot.slices
    ]
    decode(PackedExperts(hot.layer.format, [part for part, _ in hot.slices], packed), weights, torch_ops)
    swiglu = hot.layer.swiglu
    gate, up = _outputs(weights.gate_up, x).chunk(2)
    gate, up = gate + _lora(hot, block, place, "gate_proj", x), up + _lora(hot, block, place, "up_proj", x)
    gate, up = gate.clamp(max=swiglu.gate_most), up.clamp(-swiglu.limit, swiglu.limit) + swiglu.shift
    h = gate * torch.sigmoid(swiglu.alpha * gate + swiglu.cubic * gate**3) * up
    return _outputs(weights.down, h) + _lora(hot, block, place, "down_proj", h)


def _outputs(matrix: ChunkMatrix, x: Tensor) -> Tensor:
    """W x plus the biases. Both are divided by the scale, the biases in two parts behind the weights."""
    y = matrix.values[0, :, : len(x)].float() @ x
    if matrix.biases:
        y += matrix.values[0, :, len(x) :][:, :2].float().sum(1)
    return y if matrix.scale is None else y * matrix.scale[0]


def _lora(hot: HotLayer, block: Tensor, place: Tensor | None, name: str, x: Tensor) -> Tensor | float:
    """scaling · B A x. Places beyond the rank are left out: they may still hold what another adapter had there."""
    if place is None or hot.stack is None or hot.stacks is None:
        return 0.0
    at = place.clamp(min=0).long()
    stack, mine = hot.stack, hot.stacks[block, at]
    a = mine[stack.a[name] :][: stack.width * len(x)].view(stack.width, len(x)).float()
    outputs = hot.layer.hidden_size if name == "down_proj" else hot.layer.intermediate_size
    b = mine[stack.b[name] :][: stack.width * outputs].view(outputs, stack.width).float()
    rank = hot.ranks[at, PROJECTIONS.index(name)].where(place >= 0, 0)
    inside = torch.arange(stack.width, device=x.device) < rank
    return b.where(inside, 0) @ torch.where(inside, a @ x, 0)
