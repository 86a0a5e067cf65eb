"""Models without weights, for everything that is decided before a weight is read."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ktft.model.prediction import add_prediction


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class for the whole model: of text alone, or of images too."""
    sees_images = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees_images else AutoModelForCausalLM


def meta_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The model that LLaMA-Factory would load, on the meta device, whatever quantization its checkpoint has."""
    plain = copy.deepcopy(config)
    vars(plain).pop("quantization_config", None)
    with no_init_weights(), torch.device("meta"):
        model: PreTrainedModel = auto_class(config).from_config(plain)
    model.tie_weights()  # which initializing would do
    add_prediction(model)
    return model
