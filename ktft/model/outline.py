"""The plan for loading a model, made with all checks of a load but without reading a weight; `ktft convert` uses it."""

from __future__ import annotations

import os

from transformers import AutoConfig

from ktft.checkpoint.reader import CheckpointReader
from ktft.config import Settings
from ktft.model.meta import meta_model
from ktft.model.quantizer import LoadPlan


def outline(directory: str | os.PathLike[str], settings: Settings) -> LoadPlan:
    """Compare a checkpoint with its config, reading only headers. The returned plan's layers are empty.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the model is not supported; shards are damaged; a tensor is missing or unexpected, or has a wrong
            shape or dtype.
    """
    files = CheckpointReader.from_directory(directory).files
    model = meta_model(AutoConfig.from_pretrained(directory))
    return LoadPlan(model, [str(file) for file in files], settings)
