"""Families that ktft has a row for and the installed transformers no class: they are refused as soon as they are named.

transformers would advise another version of itself, with which LLaMA-Factory does not work.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from ktft.checkpoint.families import ROWS
from ktft.versions import NEWEST


class LackingConfig(PreTrainedConfig):
    """Stands for the configuration of a family that transformers lacks. Making one raises ValueError."""

    family = ""

    def __new__(cls, *_: Any, **__: Any) -> LackingConfig:
        raise ValueError(
            f"transformers {transformers.__version__} has no {cls.family} (model_type {cls.model_type!r}); ktft trains "
            f"it with {NEWEST.users}, in an environment without LLaMA-Factory: {NEWEST.pip_install()}"
        )


def register() -> None:
    """Make transformers refuse these model types so. Doing it twice changes nothing."""
    for row in ROWS:
        for model_type in row.model_types:
            if model_type not in CONFIG_MAPPING:
                stands = type("LackingConfig", (LackingConfig,), {"model_type": model_type, "family": row.name})
                AutoConfig.register(model_type, stands)


def is_lacking(model_type: str) -> bool:
    """Whether transformers has no class for a model type of `ROWS`. `register` must have run."""
    return model_type not in CONFIG_MAPPING or issubclass(CONFIG_MAPPING[model_type], LackingConfig)
