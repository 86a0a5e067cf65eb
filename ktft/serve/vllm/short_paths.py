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
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.layernorm import RMSNorm

from ktft.hosts.vllm import ATTENTION_FORWARD, BLOCK_FORWARD, EXPERTS_FORWARD, NORM_FORWARD
from ktft.native.norm import MULTIPLE, HostNorm
from ktft.native.routing import choose_experts
from ktft.serve.runtime.served_model import current
from ktft.serve.vllm.attention import (
    LayerAttention,
    forget,
    is_decode,
    keeps_own_cache,
    layer_attention,
    steps,
)
from ktft.serve.vllm.attention_block import BLOCKS, block_forward, linear_product
from ktft.serve.vllm.moe import KtftMoEMethod

Forward = Callable[..., Any]


def shorten(model: nn.Module) -> None:
    """Give the layers of a loaded model shorter forwards. ktft has its own rounding of norms, attention and routing.

    For steps that are not compiled.
    """
    forget()
    for module in model.modules():
        kind = type(module)
        if kind is RMSNorm and (forward := _norm(module)):
            NORM_FORWARD.put(module, forward)
        elif kind is Attention and (forward := _attention(module)):
            ATTENTION_FORWARD.put(module, forward)
        elif kind is MoERunner and (forward := _experts(module)):
            EXPERTS_FORWARD.put(module, forward)
        elif kind.__name__ in BLOCKS and (forward := block_forward(module)):
            BLOCK_FORWARD.put(module, forward)


def _norm(layer: RMSNorm) -> Forward | None:
    if not layer.has_weight or layer.variance_size_override is not None or layer.weight.dtype != torch.bfloat16:
        return None
    if layer.weight.shape[0] % MULTIPLE:
        return None
    own = layer.forward
    norm = HostNorm(current().runtime, layer.weight.data, layer.variance_epsilon)

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


def _experts(layer: MoERunner) -> Forward | None:
    """Router, routed experts and shared experts of one process."""
    routed = layer.routed_experts
    method, config = routed.quant_method, layer.moe_config
    parallel = config.moe_parallel_config
    if (
        type(method) is not KtftMoEMethod
        or type(layer.router) is not CPURouter
        or layer.router.eplb_state is not None
        or layer.routed_input_transform is not None
        or layer.routed_output_transform is not None
        or layer._fse_fuse_gate
        or config.is_sequence_parallel
        or max(parallel.tp_size, parallel.ep_size, parallel.dp_size, config.pcp_size) > 1
        or config.hidden_dim != routed.hidden_size
    ):
        return None
    own, gate, router, scale = layer.forward, layer.gate, layer.router, layer.routed_scaling_factor
    shared = layer._shared_experts and layer._shared_experts._layer
    logits_of = None if gate is None else _gate(gate)
    choose = _choice(router)

    def forward(hidden_states: Tensor, router_logits: Tensor, *rest: Any, **named: Any) -> Tensor:
        if rest or named or hidden_states.dtype == torch.float16 or router.capture_fn is not None:
            out: Tensor = own(hidden_states, router_logits, *rest, **named)
            return out
        beside = None if shared is None else shared(hidden_states)
        if logits_of is not None:
            router_logits = logits_of(hidden_states)
        out = method.apply(routed, hidden_states, *choose(hidden_states, router_logits))
        if scale != 1.0:
            out *= scale
        return out if beside is None else beside + out

    return forward


def _gate(gate: Any) -> Callable[[Tensor], Tensor]:
    """The logits of a router."""
    product = linear_product(gate)
    bf16 = gate.weight.dtype == torch.bfloat16 and getattr(gate, "out_dtype", None) in (None, torch.bfloat16)
    if product is not None and bf16:
        return product

    def logits(x: Tensor) -> Tensor:
        found: Tensor = gate.forward(x)[0]
        return found

    return logits


def _choice(router: CPURouter) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Weights and numbers of the experts, from hidden states and logits."""
    plain = not router.use_grouped_topk and router.custom_routing_function is None and router.scoring_func == "softmax"
    runtime, top_k, renormalize = current().runtime, router.top_k, router.renormalize

    def choice(hidden_states: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        if plain and logits.dtype == torch.bfloat16:
            return choose_experts(runtime, logits, top_k, renormalize)
        found: tuple[Tensor, Tensor] = router._compute_routing(hidden_states, logits, None)
        return found

    return choice
