"""vLLM's entry point for plugins, called in each of its processes: quantization method and model loader `ktft`."""

from __future__ import annotations

from typing import Any

from ktft.config import serve_settings


def register() -> None:
    """Make vLLM know `--quantization ktft` and `--load-format ktft`, in a process of `ktft serve`. Else do nothing."""
    if serve_settings() is not None:
        _register()


def _register() -> None:
    import torch
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.model_loader import register_model_loader

    from ktft.serve.loader import KtftModelLoader
    from ktft.serve.moe import KtftMoEMethod

    if "ktft" in QUANTIZATION_METHODS:
        return  # vLLM loads plugins more than once in a process

    @register_quantization_config("ktft")
    class KtftQuantization(QuantizationConfig):
        """Routed experts by ktft's kernels, everything else in the model's dtype."""

        def get_name(self) -> Any:
            return "ktft"

        def get_supported_act_dtypes(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16, torch.float32]

        @classmethod
        def get_min_capability(cls) -> int:
            return 0

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> KtftQuantization:
            return cls()  # the checkpoint's own quantization is the loader's business

        @classmethod
        def override_quantization_method(
            cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
        ) -> Any:
            if user_quant != "ktft":
                return None
            # What the loader reads is plain: no model, and no key-value cache, may go by how files are quantized
            for config in (hf_config, hf_config.get_text_config()):
                config.quantization_config = None
            return "ktft"

        def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
            if isinstance(layer, RoutedExperts):
                return KtftMoEMethod(layer)
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    register_model_loader("ktft")(KtftModelLoader)
