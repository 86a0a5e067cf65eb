"""What vLLM must be told of some families, beside what their config.json says."""

from __future__ import annotations

from typing import Any

# transformers 5 writes a config.json without it, and vLLM would then have no place for e_score_correction_bias
_BIASED_ROUTER = {"topk_method": "noaux_tc"}
CONFIG_OVERRIDES: dict[str, dict[str, Any]] = {"deepseek_v3": _BIASED_ROUTER, "kimi_k2": _BIASED_ROUTER}
"""`model_type` -> what goes over its config, for `--hf-overrides`."""

INTERLEAVED_ROPE = ("deepseek_v2", "deepseek_v3", "kimi_k2", "glm_moe_dsa", "ernie4_5_moe")
"""Values of `model_type` whose rotary embedding turns neighbours: vLLM 0.32's operator for CPUs computes it wrongly."""


def compilation_config(model_type: str, gpu: bool) -> dict[str, Any] | None:
    """For `--compilation-config`: torch's own operations in place of vLLM's where those are wrong; None for any."""
    return {"custom_ops": ["none"]} if not gpu and model_type in INTERLEAVED_ROPE else None
