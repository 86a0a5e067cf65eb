"""What vLLM must be told of each family, one row a `model_type`, and of the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ktft.serve.runtime.settings import GRAPH_TOKENS


@dataclass(frozen=True)
class VllmFamily:
    """A family as vLLM serves it.

    Attributes:
        served: whether its log-probabilities were measured to be training's (docs/reference/serve-families.md).
            `ktft serve` refuses a family until they were.
        overrides: settings that replace those of its config, for `--hf-overrides`.
        interleaved_rope: whether its rotary embedding rotates pairs of neighbours. vLLM 0.32's operator for CPUs
            computes these wrongly.
        drafts: whether its prediction layer was measured to draft the tokens that vLLM's own experts make it draft.
        tool_parser: vLLM's parser of the tool calls that released models write.
        tool_token: a token of those calls: if the tokenizer lacked it, the parser would refuse every chat.
    """

    served: bool = False
    overrides: Mapping[str, Any] | None = None
    interleaved_rope: bool = False
    drafts: bool = False
    tool_parser: str | None = None
    tool_token: str = ""


# transformers computes these families so, but transformers 5 leaves it out of the config.json that it writes. Without
# it vLLM would have no place for e_score_correction_bias, and would use softmax in place of the router's sigmoid.
_SIGMOID_ROUTER = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}

ROWS = {
    "qwen2_moe": VllmFamily(served=True, tool_parser="hermes"),
    "qwen3_moe": VllmFamily(served=True, tool_parser="hermes"),
    "qwen3_next": VllmFamily(served=True, tool_parser="hermes"),
    "qwen3_vl_moe": VllmFamily(tool_parser="hermes"),
    "qwen3_5_moe": VllmFamily(tool_parser="qwen3_xml", tool_token="<tool_call>"),
    "qwen3_5_moe_text": VllmFamily(tool_parser="qwen3_xml", tool_token="<tool_call>"),
    "deepseek_v2": VllmFamily(served=True, interleaved_rope=True),
    "deepseek_v3": VllmFamily(
        served=True,
        overrides=_SIGMOID_ROUTER,
        interleaved_rope=True,
        drafts=True,
        tool_parser="deepseek_v3",
        tool_token="<｜tool▁calls▁begin｜>",  # noqa: RUF001
    ),
    "kimi_k2": VllmFamily(
        served=True,
        overrides=_SIGMOID_ROUTER,
        interleaved_rope=True,
        tool_parser="kimi_k2",
        tool_token="<|tool_calls_section_begin|>",
    ),
    "glm4_moe": VllmFamily(served=True, drafts=True, tool_parser="glm45", tool_token="<tool_call>"),
    "glm_moe_dsa": VllmFamily(
        overrides=_SIGMOID_ROUTER, interleaved_rope=True, tool_parser="glm47", tool_token="<tool_call>"
    ),
    "minimax_m2": VllmFamily(tool_parser="minimax_m2", tool_token="<minimax:tool_call>"),
    "gpt_oss": VllmFamily(served=True, tool_parser="openai", tool_token="<|call|>"),
    "mixtral": VllmFamily(served=True),
    "olmoe": VllmFamily(served=True),
    "ernie4_5_moe": VllmFamily(interleaved_rope=True, tool_parser="ernie45", tool_token="<tool_call>"),
}
"""By `model_type`; a family without a row is not served."""

SERVED = tuple(sorted(model_type for model_type, row in ROWS.items() if row.served))
DRAFTS = tuple(sorted(model_type for model_type, row in ROWS.items() if row.drafts))


def of(model_type: str) -> VllmFamily:
    """The row of a `model_type`, or one that tells vLLM nothing."""
    return ROWS.get(model_type) or VllmFamily()


def compilation_config(model_type: str, gpu: bool, max_num_seqs: int) -> dict[str, Any] | None:
    """The value of `--compilation-config`; None leaves vLLM's own.

    On a GPU vLLM captures a graph of the whole decode step for each number of sequences, because padding would cost
    the experts as much as real tokens. On a CPU torch's own operations replace vLLM's where those are wrong.
    """
    if gpu:
        sizes = list(range(1, min(max_num_seqs, GRAPH_TOKENS) + 1))
        return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return {"custom_ops": ["none"]} if of(model_type).interleaved_rope else None
