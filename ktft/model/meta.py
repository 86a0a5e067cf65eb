"""Models without weights, for all that is settled before any is read."""

from __future__ import annotations

import copy

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model that LLaMA-Factory would load, on the meta device, whatever quantization its checkpoint has."""
    plain = copy.deepcopy(config)
    vars(plain).pop("quantization_config", None)
    sees_images = type(config) in AutoModelForImageTextToText._model_mapping
    with no_init_weights(), torch.device("meta"):
        model = (AutoModelForImageTextToText if sees_images else AutoModelForCausalLM).from_config(plain)
    model.tie_weights()  # which initializing would do
    return model
