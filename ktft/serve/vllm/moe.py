"""vLLM's quantization method `ktft`, which says what computes each layer, and its method for routed experts.

The latter has no parameters, since ktft computes the experts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from ktft.model.experts import layer_number
from ktft.serve.runtime.served_model import current
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm.dense_linear import EmbeddingOnHost, LinearOnHost

ACTIVATIONS = {"silu": None, "swigluoai": 7.0}
"""vLLM's activations that `ktft.swiglu.Swiglu` computes -> the clamp that is fixed in vLLM's kernels, if any."""


def _routed_experts(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: int) -> Tensor:
    return current().layers[layer](hidden_states, top_k_index, top_k_weights)


def _like(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, layer: int) -> Tensor:
    return torch.empty_like(hidden_states)


# It is an operator so that torch.compile, to which vLLM's CPU backend gives its MoE code, does not trace the kernels
direct_register_custom_op(op_name="ktft_routed_experts", op_func=_routed_experts, fake_impl=_like)


class KtftMoEMethod(FusedMoEMethodBase):
    """Computes vLLM's `RoutedExperts` with the process's `ServedModel`, which the loader `ktft` makes.

    Raises:
        ValueError: the layer asks for something that the kernels do not compute.
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
        """It creates none: the experts' weights are not torch tensors."""

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """There is none: it is for vLLM's own kernels."""
        return None

    def apply(
        self, layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """The weighted sum of the routed experts, `[T, H]`. vLLM computes shared experts."""
        if made_up():
            return torch.zeros_like(x)
        if not torch.compiler.is_compiling() and x.device.type == "cpu":
            return _routed_experts(x, topk_ids, topk_weights, self.number)
        out: Tensor = torch.ops.vllm.ktft_routed_experts(x, topk_ids, topk_weights, self.number)
        return out


def made_up() -> bool:
    """Whether vLLM runs the model on made-up tokens, to measure memory or to warm up: experts would only cost time.

    In such a pass attention has no metadata, while every pass of a request has it. A pass that is captured in a CUDA
    graph may lack metadata too, but its context says that it is captured.
    """
    if not is_forward_context_available():
        return False
    context = get_forward_context()
    return context.attn_metadata is None and context.cudagraph_runtime_mode == CUDAGraphMode.NONE


class KtftQuantization(QuantizationConfig):
    """ktft's kernels compute routed experts; vLLM computes everything else in the model's dtype."""

    def get_name(self) -> Any:
        """The value of `--quantization`."""
        return "ktft"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes that hidden states may have."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """The lowest compute capability of a GPU; 0 stands for any."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """There are none: the settings come in the environment, see `ktft.serve.runtime.settings`."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KtftQuantization:
        """The method. It ignores the checkpoint's own quantization, which the loader decodes."""
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """vLLM asks whether another method may serve a checkpoint with this quantization; ktft may.

        The loader gives vLLM plain weights, so neither the model nor the KV cache may follow the files' quantization.
        """
        if user_quant != "ktft":
            return None
        for config in (hf_config, hf_config.get_text_config()):
            config.quantization_config = None
        return "ktft"

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """The method of a layer; None leaves the layer to vLLM."""
        if isinstance(layer, RoutedExperts):
            return KtftMoEMethod(layer)
        if isinstance(layer, LinearBase):
            return LinearOnHost() if self._on_host else UnquantizedLinearMethod()
        return EmbeddingOnHost() if self._on_host and isinstance(layer, VocabParallelEmbedding) else None

    @functools.cached_property
    def _on_host(self) -> bool:
        """Whether weights are read into host memory, to be packed for a GPU."""
        return not current_platform.is_cpu() and ServeSettings.from_env().dense_format is not None
