"""vLLM's entry point for plugins, which it calls in each of its processes."""

from __future__ import annotations

import gc

from ktft import hosts
from ktft.config import serve_settings
from ktft.hosts import vllm
from ktft.system import end_without_collections


def register() -> None:
    """Add ktft's quantization method and model loader to vLLM's, in a process of `ktft serve` only."""
    if serve_settings() is None:
        return
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
    from vllm.model_executor.model_loader import register_model_loader

    from ktft.serve.vllm.loader import KtftModelLoader
    from ktft.serve.vllm.moe import KtftQuantization

    if "ktft" in QUANTIZATION_METHODS:
        return  # vLLM loads plugins more than once in a process
    hosts.install(vllm.OF_PROCESS)
    register_quantization_config("ktft")(KtftQuantization)
    register_model_loader("ktft")(KtftModelLoader)
    # A collection that looks at all of vLLM's import takes half a second, and vLLM asks for some before it serves
    gc.freeze()
    end_without_collections()
