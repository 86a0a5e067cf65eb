"""vLLM's quantization method `ktft`, which says what computes each layer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ktft.serve.vllm.moe import KtftMoEMethod


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
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
