"""What a Trainer does anew for each micro-batch though nothing has changed: walks over all modules of a model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn


class CountedOnce:
    """Lets a model count its parameters once, until `close`. transformers does so for the FLOPs of each micro-batch.

    Nothing adds or removes parameters meanwhile.
    """

    def __init__(self, model: nn.Module) -> None:
        self._models = [each for each in model.modules() if hasattr(type(each), "num_parameters")]
        for each in self._models:
            each.__dict__["num_parameters"] = functools.cache(_counting(each))

    def close(self) -> None:
        for each in self._models:
            each.__dict__.pop("num_parameters", None)


def _counting(model: Any) -> Any:
    return model.num_parameters


@contextlib.contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """A block in which a model is in training mode, whatever asks for that again."""
    model.train()

    def train(mode: bool = True) -> nn.Module:
        if not mode:
            del model.__dict__["train"]
            return model.train(mode)
        return model

    own: dict[str, Any] = model.__dict__
    own["train"] = train
    try:
        yield
    finally:
        own.pop("train", None)
