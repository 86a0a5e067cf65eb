"""Attention blocks of vLLM's models on a CPU: the projections, and all that lies between them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from ktft.native.attention import STEP, AttentionBlock, DecodeStep, Heads, KvCache
from ktft.native.dense import HostDense
from ktft.serve.runtime.served_model import current
from ktft.serve.vllm.attention import LayerAttention, is_decode, keeps_own_cache, layer_attention, steps
from ktft.serve.vllm.dense_linear import KtftDenseMethod

Product = Callable[[Tensor], Tensor]
Forward = Callable[[Tensor, Tensor], Tensor]
"""From positions and hidden states to what is added to these."""

BLOCKS = "Qwen2MoeAttention", "Qwen3MoeAttention", "MixtralAttention", "Glm4MoeAttention"
"""vLLM's classes that do nothing but project, norm each head if they have norms, rotate, attend and project back."""


def attention_block(block: Any) -> Block | Forward | None:
    """A block, or its forward alone where vLLM writes the KV cache. Its layers are called without `nn.Module.__call__`,
    so without hooks, which vLLM's own layers do not have.
    """
    qkv, out = linear_product(block.qkv_proj), linear_product(block.o_proj)
    rotary, attend = block.rotary_emb, block.attn
    if qkv is None or out is None or not isinstance(rotary, RotaryEmbedding) or type(attend) is not Attention:
        return None
    normed = hasattr(block, "q_norm") and getattr(block, "use_qk_norm", True)
    norms = (block.q_norm, block.k_norm) if normed else ()
    by_layers = _by_layers(block, norms, qkv, out)
    if not keeps_own_cache(attend) or not _computes(rotary, norms):
        return by_layers
    return Block(block, norms, qkv, out, by_layers)


def linear_product(layer: LinearBase) -> Product | None:
    """The product of a linear layer of one process, with its own bias."""
    whole = isinstance(layer, ReplicatedLinear) or (
        type(layer) in (QKVParallelLinear, RowParallelLinear) and layer.tp_size == 1
    )
    if not whole or layer.skip_bias_add:
        return None

    def product(x: Tensor) -> Tensor:
        method: Any = layer.quant_method  # LoRA may have come before it
        found: Tensor = method.apply(layer, x, layer.bias)
        return found

    return product


def _by_layers(block: Any, norms: tuple[RMSNorm, ...], qkv: Product, out: Product) -> Forward:
    """A block by its layers, for steps whose KV cache ktft does not write."""
    rotary, attend = block.rotary_emb, block.attn
    sizes, head_size = [block.q_size, block.kv_size, block.kv_size], block.head_dim

    def forward(positions: Tensor, hidden_states: Tensor) -> Tensor:
        q, k, v = qkv(hidden_states).split(sizes, -1)
        if norms:
            q_norm, k_norm = norms
            q = q_norm.forward(q.view(-1, sizes[0] // head_size, head_size)).view(q.shape)
            k = k_norm.forward(k.view(-1, sizes[1] // head_size, head_size)).view(k.shape)
        q, k = rotary._forward_method(positions, q, k)
        return out(attend.forward(q, k, v))

    return forward


def _computes(rotary: RotaryEmbedding, norms: tuple[RMSNorm, ...]) -> bool:
    """Whether `Heads` does what these layers do."""
    plain = type(rotary).forward_cpu is RotaryEmbedding.forward_cpu
    normal = all(
        type(norm) is RMSNorm
        and norm.has_weight
        and norm.variance_size_override is None
        and norm.weight.dtype == torch.bfloat16
        and norm.variance_epsilon == norms[0].variance_epsilon
        for norm in norms
    )
    return normal and plain and rotary.is_neox_style and rotary.rotary_dim % STEP == 0


@dataclass(frozen=True)
class _Parts:
    """What computes a block whose layer has its KV cache."""

    attention: LayerAttention
    heads: Heads
    whole: AttentionBlock | None


class Block:
    """An attention block whose KV cache ktft writes."""

    def __init__(
        self,
        block: Any,
        norms: tuple[RMSNorm, ...],
        qkv: Product,
        out: Product,
        by_layers: Forward,
    ) -> None:
        self._block, self._norms, self._qkv, self._out, self._by_layers = block, norms, qkv, out, by_layers
        self._layer, self._name, self._runtime = block.attn, block.attn.layer_name, current().runtime
        self._own = block.qkv_proj.quant_method, block.o_proj.quant_method
        self._parts = functools.cache(self._make_parts)

    def _make_parts(self, cache_at: int) -> _Parts | None:
        layer = self._layer
        attention = layer_attention(layer, self._runtime)
        if attention is None:
            return None
        norms: Any = tuple(norm.weight.data for norm in self._norms) or None
        epsilon = self._norms[0].variance_epsilon if self._norms else 0.0
        turns = self._block.rotary_emb.cos_sin_cache.to(torch.bfloat16)
        heads = Heads(self._runtime, attention.decode.sizes, norms, epsilon, turns)
        packed = [method.weight for method in self._own if isinstance(method, KtftDenseMethod)]
        qkv, out = packed if len(packed) == 2 else (None, None)
        whole = None
        if isinstance(qkv, HostDense) and isinstance(out, HostDense):
            whole = AttentionBlock(qkv, heads, attention.decode, out)
        return _Parts(attention, heads, whole)

    def whole_step(self, positions: Tensor, hidden_states: Tensor) -> tuple[AttentionBlock, KvCache, DecodeStep] | None:
        """What computes a step in one call, if that is possible."""
        found = self._find(positions, hidden_states)
        return None if found is None else self._whole(positions, *found)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """What is added to hidden states."""
        found = self._find(positions, hidden_states)
        if found is None:
            return self._by_layers(positions, hidden_states)
        if whole := self._whole(positions, *found):
            block, cache, step = whole
            return block(hidden_states.contiguous(), cache, step)
        parts, metadata, places = found
        attention, rows = parts.attention, hidden_states.shape[0]
        qkv = self._qkv(hidden_states)
        parts.heads.write(qkv, positions, places, attention.cache)
        heads, kv_heads, size, _ = astuple(attention.decode.sizes)
        q, k, v = qkv.view(rows, -1, size).split([heads, kv_heads, kv_heads], 1)
        out = torch.empty(rows, heads, size, dtype=qkv.dtype)
        if is_decode(metadata, rows):
            step = steps.of(get_forward_context(), metadata, positions, places)
            attention.decode(q, attention.cache, step, out)
        else:
            self._layer.impl.forward(self._layer, q, k, v, self._layer.kv_cache, metadata, out)
        return self._out(out.view(rows, -1))

    def _find(self, positions: Tensor, hidden_states: Tensor) -> tuple[_Parts, Any, Tensor] | None:
        """What computes a step, vLLM's metadata of it, and its tokens' slots; None where vLLM writes the KV cache."""
        context = get_forward_context()
        metadata, slots = context.attn_metadata, context.slot_mapping
        name, rows = self._name, hidden_states.shape[0]
        if not isinstance(metadata, dict) or name not in slots or hidden_states.dtype != torch.bfloat16:
            return None
        step, places = metadata[name], slots[name]
        parts = self._parts(self._layer.kv_cache.data_ptr())
        unpadded = positions.shape == places.shape == (rows,) and step.num_actual_tokens == rows
        return (parts, step, places) if parts and unpadded else None

    def _whole(
        self, positions: Tensor, parts: _Parts, metadata: Any, places: Tensor
    ) -> tuple[AttentionBlock, KvCache, DecodeStep] | None:
        if parts.whole is None or not is_decode(metadata, len(places)) or not self._is_plain():
            return None
        return parts.whole, parts.attention.cache, steps.of(get_forward_context(), metadata, positions, places)

    def _is_plain(self) -> bool:
        """Whether no LoRA has come before the projections' own methods."""
        block, (qkv, out) = self._block, self._own
        return block.qkv_proj.quant_method is qkv and block.o_proj.quant_method is out
