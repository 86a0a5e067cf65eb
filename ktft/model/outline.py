"""A model as it would be loaded, without a weight: what `ktft convert` packs, after all the checks of a load."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig

from ktft.checkpoint.reader import CheckpointReader
from ktft.config import Settings
from ktft.model.quantizer import LoadPlan


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class for the whole model: of text alone, or of images too."""
    return AutoModelForImageTextToText if "text_config" in type(config).sub_configs else AutoModelForCausalLM


def outline(directory: str | os.PathLike[str], settings: Settings) -> LoadPlan:
    """Compare a checkpoint with its config, from headers alone. The plan's layers are empty.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the model is not supported; shards are damaged; a tensor is missing or left over, or has a wrong
            shape or dtype.
    """
    files = CheckpointReader.from_directory(directory).files
    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = auto_class(config).from_config(config)
    return LoadPlan(model, [str(file) for file in files], settings)
