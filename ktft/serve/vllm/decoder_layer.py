"""Decoder layers of vLLM's models on a CPU, in one call each in steps of a few tokens a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ktft.native.attention import AttentionBlock
from ktft.native.decoder import DecoderLayer
from ktft.native.norm import HostNorm
from ktft.serve.vllm.attention_block import Block
from ktft.serve.vllm.experts_block import ExpertsBlock, Routed

Forward = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""From positions, hidden states and the residual that they are added to, to those that the next layer takes."""

LAYERS = ("Qwen3MoeDecoderLayer",)
"""vLLM's classes that do nothing but norm, attend, norm and mix experts, and whose routers are packed."""


def layer_forward(layer: Any, norms: dict[Any, HostNorm], blocks: dict[Any, Block | ExpertsBlock]) -> Forward | None:
    """The forward of a layer, whose parts ktft computes by these.

    Its blocks are called without `nn.Module.__call__`, so without hooks, which vLLM's own layers do not have.
    """
    moe = layer.mlp
    attention, experts = blocks.get(layer.self_attn), blocks.get(getattr(moe, "experts", None))
    first, second = norms.get(layer.input_layernorm), norms.get(layer.post_attention_layernorm)
    routed = experts.behind(moe.gate) if isinstance(experts, ExpertsBlock) else None
    if not isinstance(attention, Block) or routed is None or first is None or second is None:
        return None
    return _Layer(layer.forward, attention, routed, first, second).forward


class _Layer:
    def __init__(
        self, own: Forward, attention: Block, experts: Routed, attention_norm: HostNorm, experts_norm: HostNorm
    ) -> None:
        self._own, self._attention, self._experts = own, attention, experts
        self._norms = attention_norm, experts_norm
        self._made: tuple[AttentionBlock, DecoderLayer] | None = None

    def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        found = self._attention.whole_step(positions, hidden_states)
        if found is None or not self._experts.is_plain():
            return self._own(positions, hidden_states, residual)
        block, cache, step = found
        return self._layer(block)(hidden_states.contiguous(), residual, cache, step)

    def _layer(self, block: AttentionBlock) -> DecoderLayer:
        if self._made is None or self._made[0] is not block:  # the KV cache may move
            first, second = self._norms
            self._made = block, DecoderLayer(first, block, second, self._experts.block)
        return self._made[1]
