"""vLLM's entry point for plugins, called in each of its processes: quantization method and model loader `ktft`."""

from __future__ import annotations

from ktft.config import serve_settings


def register() -> None:
    """Make vLLM know `--quantization ktft` and `--load-format ktft`, in a process of `ktft serve`. Else do nothing."""
    if serve_settings() is not None:
        _register()


def _register() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from ktft.serve.vllm.loader import KtftModelLoader
    from ktft.serve.vllm.quantization import KtftQuantization

    if "ktft" in QUANTIZATION_METHODS:
        return  # vLLM loads plugins more than once in a process
    register_quantization_config("ktft")(KtftQuantization)
    register_model_loader("ktft")(KtftModelLoader)
