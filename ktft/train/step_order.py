"""The order of an optimizer step: which of its micro-batches go through the decoder layers together.

The Trainer hands over one micro-batch after the other. All but the last of a group are put off; with the last, the
whole group is trained, and its loss is the sum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ktft.device import device_of
from ktft.model.experts import decoder_lists, find_experts
from ktft.model.layer_order import LayerOrder, obstacle
from ktft.model.memory import SPARE_SHARE, SPARE_VRAM
from ktft.model.tensor_parallel import tp_size_of
from ktft.ranks.group import Ranks
from ktft.ranks.sharded import is_divided
from ktft.system import available_memory

_logger = logging.getLogger("ktft")
TOKENS = "_ktft_tokens_together"
"""The attribute of a Trainer that has `StepOrder.tokens`. Checkpoints keep it, so that a run which is resumed makes the
same sums in the same order, however much memory is free then."""
_LAYER_TENSORS, _LOGIT_BYTES = 40, 16
"""What a token takes: tensors of hidden_size values in one decoder layer with gradients, and bytes for each logit."""


@dataclass
class StepOrder:
    """The order of one run's steps.

    Attributes:
        tokens: the most tokens, padding included, that go together; None while it is not known.
        count: the number of micro-batches that go together; None if `tokens` says so.
        layers: runs them; None if each micro-batch goes through the whole model by itself.
        ranks: the processes whose groups must be the same.
    """

    layers: LayerOrder | None
    count: int | None = None
    tokens: int | None = None
    ranks: Ranks | None = None
    step: list[Any] = field(default_factory=list)
    groups: list[list[Any]] = field(default_factory=list)

    @classmethod
    def of(cls, trainer: Any, together: Ranks | None) -> StepOrder:
        """The order that a Trainer's settings and model allow."""
        asked = next(iter(find_experts(trainer.model).values())).together
        why = "" if trainer.args.gradient_accumulation_steps == 1 else _why_not(trainer, asked)
        if why is None:
            count = None if asked == "auto" else int(asked)
            return cls(LayerOrder(trainer.model), count, getattr(trainer, TOKENS, None), together)
        if why:
            _logger.info("each micro-batch of a step goes through the model by itself: %s", why)
        return cls(None)

    def begin(self, step: Sequence[Any]) -> None:
        """Take the micro-batches of the next optimizer step."""
        self.step, self.groups = list(step), []

    def run(self, trainer: Any, batch: Any, train: Callable[[Any], Tensor]) -> Tensor:
        """Train a micro-batch by `train`, now or together with others. Returns the loss of what is trained now."""
        if self.layers is None or len(self.step) == 1 or not any(each is batch for each in self.step):
            return train(batch)
        if not self.groups:
            self.groups = list(self._grouped(trainer))
        group = next(group for group in self.groups if any(each is batch for each in group))
        if group[-1] is not batch:
            return torch.zeros((), device=trainer.args.device)
        if len(group) == 1:
            return train(batch)
        with trainer.accelerator.no_sync(trainer.model_wrapped):  # DDP's graph ends at each layer
            losses = self.layers.run([partial(train, each) for each in group])
        return torch.stack(losses).sum()

    @property
    def shared(self) -> bool:
        """Whether micro-batches of the present step went together, so that DDP has not seen their gradients."""
        return any(len(group) > 1 for group in self.groups)

    def _grouped(self, trainer: Any) -> Iterator[list[Any]]:
        """Neighbours that fit together."""
        sizes = [_tokens_of(batch) for batch in self.step]
        if self.ranks is not None:
            sizes = [max(each) for each in zip(*self.ranks.numbers(*sizes), strict=True)]
        if self.count is None and self.tokens is None:
            self.tokens = self._room(trainer.model, max(sizes))
            setattr(trainer, TOKENS, self.tokens)
            _tell(self.tokens, sizes)
        group: list[Any] = []
        taken = 0
        for batch, size in zip(self.step, sizes, strict=True):
            full = len(group) == self.count if self.count is not None else taken + size > (self.tokens or 0)
            if group and full:
                yield group
                group, taken = [], 0
            group, taken = [*group, batch], taken + size
        yield group

    def _room(self, model: nn.Module, most: int) -> int:
        """How many tokens may go together, by the memory that is free now. `most` is the most of one micro-batch."""
        by_token, logits = token_bytes(model)
        device = next(model.parameters()).device
        free, reserved = device_of(device).free_bytes(), device_of(device).memory_reserved()
        room = available_memory() // 2 if free is None else free[0] - max(SPARE_VRAM, int(SPARE_SHARE * reserved))
        fitting = max((room - most * logits) // by_token, most)
        return fitting if self.ranks is None else min(fit for (fit,) in self.ranks.numbers(fitting))


def token_bytes(model: Any) -> tuple[int, int]:
    """Bytes that a token takes while its micro-batch waits for others in the layers, and while the loss is computed.

    It keeps each decoder layer's input and the output of its experts, and without checkpointing all of the layer.
    """
    config = model.config.get_text_config()
    value = next(model.parameters()).element_size()
    layers = sum(len(model.get_submodule(name)) for name in decoder_lists(model))
    checkpointing = any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
    tensors = 2 * layers + _LAYER_TENSORS if checkpointing else layers * _LAYER_TENSORS
    return tensors * config.hidden_size * value, config.vocab_size * _LOGIT_BYTES


def _why_not(trainer: Any, asked: int | str) -> str | None:
    """Why micro-batches do not go together; None if they do."""
    model = trainer.model
    reasons = (
        (asked == 1, "micro_batches_together is 1"),
        (is_divided(model), "FSDP2 divides the layers, and gathers them for one micro-batch at a time"),
        (tp_size_of(model) > 1, "the attention is tensor parallel"),
        (trainer.args.torch_compile, "torch_compile is on"),
        (
            type(trainer)._prepare_inputs is not transformers.Trainer._prepare_inputs,
            f"{type(trainer).__name__} prepares its inputs by code of its own, which may call the model",
        ),
    )
    return next((why for holds, why in reasons if holds), obstacle(model))


def _tokens_of(batch: Any) -> int:
    """The tokens of a micro-batch, padding included; of every sequence in it."""
    found = batch.items() if isinstance(batch, Mapping) else ()
    return sum(each.numel() for name, each in found if str(name).endswith("input_ids") and isinstance(each, Tensor))


def _tell(tokens: int, sizes: Sequence[int]) -> None:
    count = min(len(sizes), tokens // max(max(sizes), 1))
    _logger.info(
        "%d of a step's %d micro-batches go through each layer together, so that an expert is needed once for all of "
        "them: memory is left for %s tokens",
        count, len(sizes), f"{tokens:,}",
    )  # fmt: skip
