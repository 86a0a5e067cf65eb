"""vLLM's quantization method `ktft`: who computes which layer."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from ktft.serve.vllm.moe import KtftMoEMethod


class KtftQuantization(QuantizationConfig):
    """Routed experts by ktft's kernels, everything else in the model's dtype."""

    def get_name(self) -> Any:
        """As in `--quantization`."""
        return "ktft"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Dtypes of hidden states."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Of a GPU: any."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: settings come by `ktft.serve.runtime.settings`."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KtftQuantization:
        """The method, whatever the checkpoint's own quantization is: that is the loader's business."""
        return cls()

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> Any:
        """vLLM asks whether a checkpoint with this quantization may be served by another: by ktft, yes.

        What the loader reads is plain, so no model, and no key-value cache, may go by how files are quantized.
        """
        if user_quant != "ktft":
            return None
        for config in (hf_config, hf_config.get_text_config()):
            config.quantization_config = None
        return "ktft"

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        """A layer's method; None leaves it to vLLM."""
        if isinstance(layer, RoutedExperts):
            return KtftMoEMethod(layer)
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
