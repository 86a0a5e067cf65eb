"""Shorter ways through layers of vLLM on a CPU.

Beside one token's products, what vLLM's layers do in Python to find out that nothing special is asked of them takes a
tenth of the time: weights push everything else out of the caches, so each line of Python comes from memory. `shorten`
asks these questions once. A layer of which something special is asked keeps its own forward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm import ir
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from ktft import native
from ktft.hosts.vllm import ATTENTION_FORWARD, BLOCK_FORWARD, EXPERTS_FORWARD, NORM_FORWARD
from ktft.native.attention import DecodeAttention
from ktft.serve.runtime.served_model import current
from ktft.serve.vllm.attention import decode_attention, forget
from ktft.serve.vllm.moe import KtftMoEMethod
from ktft.serve.vllm.norms import PROVIDER

Forward = Callable[..., Any]

BLOCKS = "Qwen2MoeAttention", "Qwen3MoeAttention", "MixtralAttention", "Glm4MoeAttention"
"""vLLM's classes that do nothing but project, norm each head if they have norms, rotate, attend and project back."""


def shorten(model: nn.Module) -> None:
    """Give the layers of a loaded model shorter forwards. Where ktft computes attention, its rounding is its own.

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
        elif kind.__name__ in BLOCKS and (forward := _block(module)):
            BLOCK_FORWARD.put(module, forward)


def _norm(layer: RMSNorm) -> Forward | None:
    """What `ktft.serve.vllm.norms` registers, where vLLM would choose it."""
    chosen = all(op.get_priority()[:1] == [PROVIDER] for op in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm))
    exact = chosen and native.cpu_features()["avx512"]
    if not exact or not layer.has_weight or layer.variance_size_override is not None:
        return None
    own, weight, epsilon = layer.forward, layer.weight.data, layer.variance_epsilon
    norm, add_and_norm = torch.ops._C.rms_norm.default, torch.ops._C.fused_add_rms_norm.default

    def forward(x: Tensor, residual: Tensor | None = None) -> Any:
        if x.dtype != weight.dtype or (residual is not None and residual.dtype != x.dtype):
            return own(x, residual)
        if residual is None:
            out = torch.empty(x.shape, dtype=x.dtype)
            norm(out, x.contiguous(), weight, epsilon)
            return out
        add_and_norm(x, residual, weight, epsilon)
        return x, residual

    return forward


def _attention(layer: Attention) -> Forward | None:
    """Attention of a decoder over its own KV cache. Steps of one token a request are ktft's to compute where it can."""
    impl: Any = layer.impl
    if (
        type(impl) is not CPUAttentionBackendImpl
        or layer.query_quant is not None
        or layer.kv_sharing_target_layer_name is not None
        or layer.attn_backend.forward_includes_kv_cache_update
    ):
        return None
    own, name, runtime = layer.forward, layer.layer_name, current().runtime
    heads, groups, size, value_size = layer.num_heads, layer.num_kv_heads, layer.head_size, layer.head_size_v

    @functools.cache
    def ours(cache_at: int) -> DecodeAttention | None:
        return decode_attention(layer, runtime)

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
        single = step.max_query_len == 1 and step.num_actual_tokens == rows == step.seq_lens.shape[0]
        if single and (decode := ours(cache.data_ptr())):
            decode(queries, cache, step.block_table, step.seq_lens, outs)
        else:
            impl.forward(layer, queries, key, value, cache, step, outs)
        return out

    return forward


def _block(block: Any) -> Forward | None:
    """Attention with its projections. The layers of the block are called without `nn.Module.__call__`, so without
    hooks, which vLLM's own layers do not have.
    """
    qkv, out = _linear(block.qkv_proj), _linear(block.o_proj)
    rotary, attend = block.rotary_emb, block.attn
    normed = hasattr(block, "q_norm") and getattr(block, "use_qk_norm", True)
    norms = (block.q_norm, block.k_norm) if normed else ()
    if qkv is None or out is None or not isinstance(rotary, RotaryEmbedding) or type(attend) is not Attention:
        return None
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


def _linear(layer: LinearBase) -> Callable[[Tensor], Tensor] | None:
    """The product of a linear layer of one process, with its own bias."""
    whole = type(layer) in (QKVParallelLinear, RowParallelLinear) and layer.tp_size == 1
    if not whole or layer.skip_bias_add:
        return None

    def product(x: Tensor) -> Tensor:
        method: Any = layer.quant_method  # LoRA may have come before it
        found: Tensor = method.apply(layer, x, layer.bias)
        return found

    return product


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

    def forward(hidden_states: Tensor, router_logits: Tensor, *rest: Any, **named: Any) -> Tensor:
        if rest or named or hidden_states.dtype == torch.float16 or router.capture_fn is not None:
            out: Tensor = own(hidden_states, router_logits, *rest, **named)
            return out
        beside = None if shared is None else shared(hidden_states)
        if gate is not None:
            router_logits = gate.forward(hidden_states)[0]
        weights, numbers = router._compute_routing(hidden_states, router_logits, None)
        out = method.apply(routed, hidden_states, weights, numbers)
        if scale != 1.0:
            out *= scale
        return out if beside is None else beside + out

    return forward
