"""A model as it would be loaded, without a weight: what `ktft convert` packs, after all the checks of a load."""

from __future__ import annotations

import os

from transformers import AutoConfig

from ktft.checkpoint.reader import CheckpointReader
from ktft.config import Settings
from ktft.model.meta import meta_model
from ktft.model.quantizer import LoadPlan


def outline(directory: str | os.PathLike[str], settings: Settings) -> LoadPlan:
    """Compare a checkpoint with its config, from headers alone. The plan's layers are empty.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the model is not supported; shards are damaged; a tensor is missing or left over, or has a wrong
            shape or dtype.
    """
    files = CheckpointReader.from_directory(directory).files
    model = meta_model(AutoConfig.from_pretrained(directory))
    return LoadPlan(model, [str(file) for file in files], settings)
