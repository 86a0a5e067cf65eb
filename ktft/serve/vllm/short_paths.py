"""Shorter ways through layers of vLLM on a CPU.

Beside one token's products, vLLM's layers in Python take a fifth of the time: weights push everything else out of the
caches, so each line of Python comes from memory. `shorten` finds out once that nothing special is asked of a layer, and
ktft then computes it in few calls. A layer of which something special is asked keeps its own forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.layernorm import RMSNorm

from ktft.hosts.vllm import ATTENTION_FORWARD, BLOCK_FORWARD, EXPERTS_FORWARD, LAYER_FORWARD, NORM_FORWARD
from ktft.native.norm import MULTIPLE, HostNorm
from ktft.serve.runtime.served_model import current
from ktft.serve.vllm.attention import (
    LayerAttention,
    forget,
    is_decode,
    keeps_own_cache,
    layer_attention,
    steps,
)
from ktft.serve.vllm.attention_block import BLOCKS, Block, attention_block
from ktft.serve.vllm.decoder_layer import LAYERS, layer_forward
from ktft.serve.vllm.experts_block import ExpertsBlock, experts_block

Forward = Callable[..., Any]


def shorten(model: nn.Module) -> None:
    """Give the layers of a loaded model shorter forwards. ktft has its own rounding of norms, attention and routing.

    For steps that are not compiled.
    """
    forget()
    norms: dict[Any, HostNorm] = {}
    blocks: dict[Any, Block | ExpertsBlock] = {}
    for module in model.modules():
        kind = type(module)
        if kind is RMSNorm and (norm := _norm(module)):
            norms[module] = norm
            NORM_FORWARD.put(module, _norm_forward(module.forward, norm))
        elif kind is Attention and (forward := _attention(module)):
            ATTENTION_FORWARD.put(module, forward)
        elif kind is MoERunner and (experts := experts_block(module)):
            blocks[module] = experts
            EXPERTS_FORWARD.put(module, experts.forward)
        elif kind.__name__ in BLOCKS and (attention := attention_block(module)):
            if isinstance(attention, Block):
                blocks[module], attention = attention, attention.forward
            BLOCK_FORWARD.put(module, attention)
    for module in model.modules():
        if type(module).__name__ in LAYERS and (forward := layer_forward(module, norms, blocks)):
            LAYER_FORWARD.put(module, forward)


def _norm(layer: RMSNorm) -> HostNorm | None:
    if not layer.has_weight or layer.variance_size_override is not None or layer.weight.dtype != torch.bfloat16:
        return None
    if layer.weight.shape[0] % MULTIPLE:
        return None
    return HostNorm(current().runtime, layer.weight.data, layer.variance_epsilon)


def _norm_forward(own: Forward, norm: HostNorm) -> Forward:
    def forward(x: Tensor, residual: Tensor | None = None) -> Any:
        if x.dtype != torch.bfloat16 or (residual is not None and residual.dtype != x.dtype):
            return own(x, residual)
        out = norm(x, residual)
        return out if residual is None else (out, residual)

    return forward


def _attention(layer: Attention) -> Forward | None:
    """Attention of a decoder over its own KV cache. Steps of a few tokens a request are ktft's where it can."""
    if not keeps_own_cache(layer):
        return None
    own, name, runtime = layer.forward, layer.layer_name, current().runtime
    heads, groups, size, value_size = layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size_v
    impl: Any = layer.impl

    @functools.cache
    def ours(cache_at: int) -> LayerAttention | None:
        return layer_attention(layer, runtime)

    def forward(query: Tensor, key: Tensor | None, value: Tensor | None, *rest: Any, **named: Any) -> Tensor:
        context = get_forward_context()
        metadata, slots = context.attn_metadata, context.slot_mapping
        if rest or named or key is None or value is None or not isinstance(metadata, dict) or name not in slots:
            out: Tensor = own(query, key, value, *rest, **named)
            return out
        rows = query.shape[0]
        out = torch.empty(rows, heads * value_size, dtype=query.dtype)
        key, value = key.view(-1, groups, size), value.view(-1, groups, value_size)
        cache = layer.kv_cache
        impl.do_kv_cache_update(layer, key, value, cache, slots[name])
        step, queries, outs = metadata[name], query.view(-1, heads, size), out.view(-1, heads, value_size)
        if is_decode(step, rows) and (found := ours(cache.data_ptr())):
            found.decode(queries, found.cache, steps.of(context, step), outs)
        else:
            impl.forward(layer, queries, key, value, cache, step, outs)
        return out

    return forward
