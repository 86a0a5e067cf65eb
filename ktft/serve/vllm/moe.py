"""vLLM's method for a layer's routed experts: no parameters, ktft computes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.utils.torch_utils import direct_register_custom_op

from ktft.model.experts import layer_number
from ktft.serve.runtime.served_model import current

ACTIVATIONS = ("silu", "swigluoai")
"""Those of vLLM that `ktft.swiglu.Swiglu` is; its constants are compared by `ktft.serve.vllm.loader`."""


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
        parallel = layer.moe_config.moe_parallel_config
        for what, found in (
            ("routing weights on the experts' input", layer.apply_router_weight_on_input),
            ("tensor parallelism", parallel.tp_size > 1),
            ("expert parallelism", parallel.ep_size > 1),
            ("data parallelism", parallel.dp_size > 1),
            (f"the activation {layer.activation.value!r}", layer.activation.value not in ACTIVATIONS),
        ):
            if found:
                raise ValueError(f"{layer.layer_name}: vLLM asks for {what}, which ktft's experts do not do")

    def create_weights(self, layer: RoutedExperts, **kwargs: Any) -> None:
        """None: the experts are not torch's."""

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None: that is for vLLM's own kernels."""
        return None

    def apply(
        self, layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """The routed experts' weighted sum; shared experts are vLLM's."""
        if _made_up():
            return torch.zeros_like(x)
        out: Tensor = torch.ops.vllm.ktft_routed_experts(x, topk_ids, topk_weights, self.number)
        return out


def _made_up() -> bool:
    """Whether vLLM passes made-up tokens through to measure memory or warm up: experts would only cost time.

    Attention gets no metadata then, which every request's pass has. A pass that a CUDA graph is made of may lack it
    too, but says that it is one.
    """
    if not is_forward_context_available():
        return False
    context = get_forward_context()
    return context.attn_metadata is None and context.cudagraph_runtime_mode == CUDAGraphMode.NONE
