"""vLLM's method for a layer's routed experts: no parameters, ktft computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.utils.torch_utils import direct_register_custom_op

from ktft.model.experts import layer_number
from ktft.serve.experts import current


def _routed_experts(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: int) -> Tensor:
    return current().layers[layer](hidden_states, top_k_index, top_k_weights)


def _like(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: int) -> Tensor:
    return torch.empty_like(hidden_states)


# An operator, so that torch.compile, which vLLM's CPU backend lets into its own MoE code, does not trace the kernels
direct_register_custom_op(op_name="ktft_routed_experts", op_func=_routed_experts, fake_impl=_like)


class KtftMoEMethod(FusedMoEMethodBase):
    """Computes `RoutedExperts` with the process's `ServedModel`, which the loader `ktft` makes.

    Raises:
        ValueError: the layer would compute something that the kernels do not.
    """

    def __init__(self, layer: RoutedExperts) -> None:
        super().__init__(layer.moe_config)
        self.number = layer_number(layer.layer_name)

    def create_weights(self, layer: RoutedExperts, **kwargs: Any) -> None:  # type: ignore[override]
        """None: the experts are not torch's."""

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: that is for vLLM's own kernels."""
        return None

    def apply(
        self, layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """The routed experts' weighted sum; shared experts are vLLM's."""
        if _profiling():
            return torch.zeros_like(x)
        out: Tensor = torch.ops.vllm.ktft_routed_experts(x, topk_ids, topk_weights, self.number)
        return out


def _profiling() -> bool:
    """Whether vLLM passes made-up tokens through, to measure memory or to warm up: it gives attention nothing then."""
    return is_forward_context_available() and get_forward_context().attn_metadata is None
