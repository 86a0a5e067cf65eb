"""SGLang's entry point for plugins, which it calls in each of its processes."""

from __future__ import annotations

from ktft.config import serve_settings


def register() -> None:
    """Add ktft's quantization method and model loader to SGLang's, and what else of SGLang ktft stands in for.

    Nothing is imported and nothing changes outside a process of `ktft serve`.
    """
    if serve_settings() is None:
        return
    from sglang.srt import server_args
    from sglang.srt.layers import quantization

    from ktft.serve.sglang import hooks
    from ktft.serve.sglang.moe import SglangQuantization

    for methods in (quantization.QUANTIZATION_METHODS, quantization.CPU_QUANTIZATION_METHODS):
        methods["ktft"] = SglangQuantization
    server_args.add_quantization_method_choices(["ktft"])
    hooks.register()
