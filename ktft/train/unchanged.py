"""What a Trainer does anew for each step or micro-batch though nothing has changed: walks over all modules of a model.

Nothing adds or removes modules or parameters while a run trains.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ktft.ranks.sharded import is_divided


class WalkedOnce:
    """Lets a model count its parameters once, and drop gradients without a walk, until `close`.

    transformers counts parameters for the FLOPs of each micro-batch. FSDP2 gives modules other parameters while they
    are gathered, so a model that it divides is walked as ever.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._counting = [each for each in model.modules() if hasattr(type(each), "num_parameters")]
        for each in self._counting:
            each.__dict__["num_parameters"] = functools.cache(_counter(each))
        self._parameters = None if is_divided(model) else list(model.parameters())
        if self._parameters is not None:
            model.__dict__["zero_grad"] = functools.partial(_zero_grad, model, self._parameters)

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        """All of the model's."""
        return self._model.parameters() if self._parameters is None else self._parameters

    def close(self) -> None:
        for each in self._counting:
            each.__dict__.pop("num_parameters", None)
        self._model.__dict__.pop("zero_grad", None)


def _counter(model: Any) -> Any:
    return model.num_parameters


def _zero_grad(model: nn.Module, parameters: list[nn.Parameter], set_to_none: bool = True) -> None:
    """`torch.nn.Module.zero_grad`."""
    if not set_to_none:
        type(model).zero_grad(model, set_to_none)
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = None


class TrainingMode:
    """Puts a model into training mode, and keeps it there whatever asks for that again."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._modules = model, list(model.modules())

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A block in which the model is in training mode."""
        model = self._model
        if not all(module.training for module in self._modules):
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
