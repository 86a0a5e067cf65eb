"""The families that SGLang was seen to compute as training does."""

from __future__ import annotations

SERVED = ("qwen3_moe",)
"""Values of `model_type`: the log-probabilities of a tiny model were measured against transformers', with an adapter
and without (tests/serve/test_sglang.py)."""
