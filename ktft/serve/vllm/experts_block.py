"""vLLM's routers and their experts on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from ktft.native.decoder import MoeBlock
from ktft.native.dense import HostDense
from ktft.native.routing import choose_experts
from ktft.serve.runtime.served_model import ServedExperts, current
from ktft.serve.vllm.attention_block import linear_product
from ktft.serve.vllm.dense_linear import KtftDenseMethod
from ktft.serve.vllm.moe import KtftMoEMethod, made_up


def experts_block(layer: MoERunner) -> ExpertsBlock | None:
    """Router, routed experts and shared experts of one process; None if something special is asked of them."""
    routed, config = layer.routed_experts, layer.moe_config
    parallel = config.moe_parallel_config
    if (
        type(routed.quant_method) is not KtftMoEMethod
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
    return ExpertsBlock(layer, routed.quant_method)


class ExpertsBlock:
    """The forward of a `MoERunner`."""

    def __init__(self, layer: MoERunner, method: KtftMoEMethod) -> None:
        self._layer, self._own, self._router, self._method = layer, layer.forward, layer.router, method
        self._scale = layer.routed_scaling_factor
        self._shared: Any = layer._shared_experts and layer._shared_experts._layer
        self._logits_of = None if layer.gate is None else _gate(layer.gate)
        self._choose = _choice(layer.router)
        self._whole = None if layer.gate is None else self._behind(layer.gate)

    def behind(self, gate: Any) -> Routed | None:
        """The block in one call, if it is nothing but this router and routed experts."""
        if self._shared is not None or self._scale != 1.0:
            return None
        return self._whole if gate is self._layer.gate else self._behind(gate)

    def forward(self, hidden_states: Tensor, router_logits: Tensor, *rest: Any, **named: Any) -> Tensor:
        special = rest or named or hidden_states.dtype == torch.float16
        if special or self._router.capture_fn is not None:
            out: Tensor = self._own(hidden_states, router_logits, *rest, **named)
            return out
        beside = None if self._shared is None else self._shared(hidden_states)
        if self._whole and hidden_states.dtype == torch.bfloat16 and self._whole.is_plain() and not made_up():
            out = self._whole.block(hidden_states.contiguous())
        else:
            if self._logits_of is not None:
                router_logits = self._logits_of(hidden_states)
            chosen = self._choose(hidden_states, router_logits)
            out = self._method.apply(self._layer.routed_experts, hidden_states, *chosen)
        if self._scale != 1.0:
            out *= self._scale
        return out if beside is None else beside + out

    def _behind(self, gate: Any) -> Routed | None:
        served, method = current().layers[self._method.number], gate.quant_method
        packed = method.weight if isinstance(method, KtftDenseMethod) and linear_product(gate) else None
        plain = type(served) is ServedExperts and _in_bf16(gate) and _by_softmax(self._router)
        return Routed(gate, self._router, served, packed) if plain and isinstance(packed, HostDense) else None


class Routed:
    """A router that chooses by softmax, and its routed experts, in one call.

    Attributes:
        block: what computes them.
    """

    def __init__(self, gate: Any, router: CPURouter, served: ServedExperts, packed: HostDense) -> None:
        self._gate, self._method, self._router, self._served = gate, gate.quant_method, router, served
        self.block: MoeBlock = served.behind(packed, router.top_k, router.renormalize)

    def is_plain(self) -> bool:
        """Whether no LoRA has come before the router's own method, no token has an adapter, and nobody listens."""
        unchanged = self._gate.quant_method is self._method and self._router.capture_fn is None
        return unchanged and not self._served.adapters_of_step()


def _gate(gate: Any) -> Callable[[Tensor], Tensor]:
    """The logits of a router."""
    product = linear_product(gate)
    if product is not None and _in_bf16(gate):
        return product

    def logits(x: Tensor) -> Tensor:
        found: Tensor = gate.forward(x)[0]
        return found

    return logits


def _in_bf16(gate: Any) -> bool:
    """Whether a router's logits are rounded to bf16."""
    return gate.weight.dtype == torch.bfloat16 and getattr(gate, "out_dtype", None) in (None, torch.bfloat16)


def _by_softmax(router: CPURouter) -> bool:
    """Whether `choose_experts` chooses as this router does."""
    return not router.use_grouped_topk and router.custom_routing_function is None and router.scoring_func == "softmax"


def _choice(router: CPURouter) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Weights and numbers of the experts, from hidden states and logits."""
    plain = _by_softmax(router)
    runtime, top_k, renormalize = current().runtime, router.top_k, router.renormalize

    def choice(hidden_states: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        if plain and logits.dtype == torch.bfloat16:
            return choose_experts(runtime, logits, top_k, renormalize)
        found: tuple[Tensor, Tensor] = router._compute_routing(hidden_states, logits, None)
        return found

    return choice
