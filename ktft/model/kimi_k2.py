"""Kimi-K2 for transformers, which lacks it: DeepSeek-V3's classes under the model type of its config.json.

Registered classes come before a checkpoint's own code, so nothing of the checkpoint runs, with or without
`trust_remote_code` (its tokenizer is code, and needs that).
"""

from __future__ import annotations

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV3Model,
)
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

MODEL_TYPE = "kimi_k2"


class KimiK2Config(DeepseekV3Config):
    """Kimi-K2's settings have DeepSeek-V3's names."""

    model_type = MODEL_TYPE


class KimiK2Model(DeepseekV3Model):
    config_class = KimiK2Config


class KimiK2ForCausalLM(DeepseekV3ForCausalLM):
    config_class = KimiK2Config


def register() -> None:
    """Make `from_pretrained` know the model type. Doing it twice changes nothing."""
    AutoConfig.register(MODEL_TYPE, KimiK2Config, exist_ok=True)
    AutoModel.register(KimiK2Config, KimiK2Model, exist_ok=True)
    AutoModelForCausalLM.register(KimiK2Config, KimiK2ForCausalLM, exist_ok=True)
    register_checkpoint_conversion_mapping(
        MODEL_TYPE, get_checkpoint_conversion_mapping(DeepseekV3Config.model_type) or [], overwrite=True
    )
