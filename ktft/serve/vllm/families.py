"""Which families vLLM serves as they were trained, and what it must be told of some, and of the GPU."""

from __future__ import annotations

from typing import Any

SERVED = (
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "kimi_k2",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
)
"""Values of `model_type` whose log-probabilities were measured to be training's: docs/reference/serve-families.md."""

# What these families are in transformers' code, and what transformers 5 leaves out of the config.json that it writes:
# vLLM would have no place for e_score_correction_bias, and take softmax for the router's sigmoid
_SIGMOID_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
CONFIG_OVERRIDES: dict[str, dict[str, Any]] = dict.fromkeys(("deepseek_v3", "kimi_k2", "glm_moe_dsa"), _SIGMOID_ROUTER)
"""`model_type` -> what goes over its config, for `--hf-overrides`."""

INTERLEAVED_ROPE = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm_moe_dsa", "ernie4_5_moe")
"""Values of `model_type` whose rotary embedding turns neighbours: vLLM 0.32's operator for CPUs computes it wrongly."""


CAPTURED = 32
"""Tokens of the largest CUDA graph; see `ktft.serve.runtime.hybrid_experts.MAX_TOKENS`."""


def compilation_config(model_type: str, gpu: bool, max_num_seqs: int) -> dict[str, Any] | None:
    """For `--compilation-config`; None for vLLM's own.

    On a GPU: graphs of whole decode steps, one for each number of sequences, since experts of padding cost as much as
    any. Without: torch's own operations in place of vLLM's where those are wrong.
    """
    if gpu:
        sizes = list(range(1, min(max_num_seqs, CAPTURED) + 1))
        return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return {"custom_ops": ["none"]} if model_type in INTERLEAVED_ROPE else None
