"""The families that vLLM serves as they were trained, and what vLLM must be told of a family and of the device."""

from __future__ import annotations

from typing import Any

from ktft.serve.runtime.settings import GRAPH_TOKENS

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

# transformers computes these families so, but transformers 5 leaves it out of the config.json that it writes. Without
# it vLLM would have no place for e_score_correction_bias, and would use softmax in place of the router's sigmoid.
_SIGMOID_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
CONFIG_OVERRIDES: dict[str, dict[str, Any]] = dict.fromkeys(("deepseek_v3", "kimi_k2", "glm_moe_dsa"), _SIGMOID_ROUTER)
"""`model_type` -> settings that replace those of its config, for `--hf-overrides`."""

INTERLEAVED_ROPE = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm_moe_dsa", "ernie4_5_moe")
"""Values of `model_type` whose rotary embedding rotates pairs of neighbours. vLLM 0.32's operator for CPUs computes
these wrongly."""

_HERMES, _QWEN3_XML = ("hermes", ""), ("qwen3_xml", "<tool_call>")
TOOL_PARSERS = {
    "qwen2_moe": _HERMES,
    "qwen3_moe": _HERMES,
    "qwen3_next": _HERMES,
    "qwen3_vl_moe": _HERMES,
    "qwen3_5_moe": _QWEN3_XML,
    "qwen3_5_moe_text": _QWEN3_XML,
    "deepseek_v3": ("deepseek_v3", "<｜tool▁calls▁begin｜>"),  # noqa: RUF001
    "kimi_k2": ("kimi_k2", "<|tool_calls_section_begin|>"),
    "glm4_moe": ("glm45", "<tool_call>"),
    "glm_moe_dsa": ("glm47", "<tool_call>"),
    "minimax_m2": ("minimax_m2", "<minimax:tool_call>"),
    "gpt_oss": ("openai", "<|call|>"),
    "ernie4_5_moe": ("ernie45", "<tool_call>"),
}
"""`model_type` -> vLLM's parser of the tool calls that released models of that type write, and a token: if the
tokenizer lacked it, the parser would refuse every chat."""


def compilation_config(model_type: str, gpu: bool, max_num_seqs: int) -> dict[str, Any] | None:
    """The value of `--compilation-config`; None leaves vLLM's own.

    On a GPU vLLM captures a graph of the whole decode step for each number of sequences, because padding would cost
    the experts as much as real tokens. On a CPU torch's own operations replace vLLM's where those are wrong.
    """
    if gpu:
        sizes = list(range(1, min(max_num_seqs, GRAPH_TOKENS) + 1))
        return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return {"custom_ops": ["none"]} if model_type in INTERLEAVED_ROPE else None
