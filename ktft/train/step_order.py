"""The order of an optimizer step: which of its micro-batches go through the decoder layers together.

The Trainer hands over one micro-batch after the other. All but the last of a group are put off; with the last, the
whole group is trained, and its loss is the sum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from ktft.config import LANE_BYTES
from ktft.dense.model import coming_bytes
from ktft.device import device_of
from ktft.model.away import HOST_SHARE, away_bytes, host_bytes
from ktft.model.experts import StepPlace, decoder_lists, find_experts
from ktft.model.layer_order import LayerOrder, obstacle
from ktft.model.lockstep import Lockstep
from ktft.model.memory import SPARE_SHARE, score_bytes, score_work, spare_bytes, waiting_bytes
from ktft.model.shape import heads_of
from ktft.model.sinks import keeps_scores
from ktft.model.tensor_parallel import tp_size_of
from ktft.model.workload import ADAM_STATES, FP32
from ktft.ranks.group import Ranks
from ktft.ranks.sharded import is_divided
from ktft.system import available_memory, readable
from ktft.train.loss import loss_room
from ktft.train.unchanged import TrainingMode

_logger = logging.getLogger("ktft")
TOKENS = "_ktft_tokens_together"
"""The attribute of a Trainer that has `StepOrder.tokens`. Checkpoints keep it, so that a run which is resumed makes the
same sums in the same order, however much memory is free then."""


class StepOrder:
    """The order of one run's steps.

    Whether micro-batches go together or not, each has random numbers of its own, and dropout on experts has one seed a
    step, so that the order changes no mask.

    Attributes:
        tokens: the most tokens, padding included, that go together; None while it is not known.
        count: the number of micro-batches that go together; None if `tokens` says so.
        layers: runs them layer by layer; None if each micro-batch goes through the whole model by itself.
        ranks: the processes whose groups must be the same.
        groups: the present step's micro-batches, by their numbers, that go together.
    """

    def __init__(self, trainer: Any, together: Ranks | None) -> None:
        self._experts = list(find_experts(trainer.model).values())
        self._training = TrainingMode(trainer.model_wrapped)
        self.layers: LayerOrder | None = None
        self._lanes = next((each.laned.lanes for each in self._experts if each.laned is not None), None)
        self._alone = False  # whether the layers also run one micro-batch
        self.count: int | None = None
        self.tokens: int | None = getattr(trainer, TOKENS, None)
        self.ranks = together
        self.step: list[Any] = []
        self.groups: list[list[int]] = []
        self._most = 0  # tokens of a group for which it was decided whether what waits goes away
        asked, self._lockstep = self._experts[0].together, Lockstep(next(trainer.model.parameters()).device)
        several = trainer.args.gradient_accumulation_steps > 1
        why = _why_not(trainer)
        if why is None:
            settings = self._experts[0].cuda_graphs, self._experts[0].gpu_activation_memory
            self.layers = LayerOrder(trainer.model, self._lockstep, *settings)
            self._alone = self.layers.pays_alone
            if not self._alone and (asked == 1 or not several):
                self.layers = None
            why = "micro_batches_together is 1" if asked == 1 else None
        self.count = 1 if why is not None or not several else None if asked == "auto" else int(asked)
        if several and why is not None:
            _logger.info("each micro-batch of a step goes through the model by itself: %s", why)

    def begin(self, step: Sequence[Any]) -> None:
        """Take the micro-batches of the next optimizer step."""
        self.step, self.groups = list(step), []
        if self.layers is not None:
            self.layers.stored.begin_step()
        self._set_place(None)
        sizes = [_tokens_of(batch) for batch in self.step]
        if self._lanes is not None and sizes:
            self._lanes.make_room(max(sizes), max(max(sizes), min(sum(sizes), self._together_at_most(sizes))))

    def _together_at_most(self, sizes: Sequence[int]) -> int:
        """The most tokens of a step with micro-batches of these sizes that go through a layer together."""
        if self.count is not None:
            return self.count * max(sizes)
        return self.tokens if self.tokens is not None else sum(sizes)

    def run(self, trainer: Any, batch: Any, train: Callable[[Any], Tensor]) -> Tensor:
        """Train a micro-batch by `train`, now or together with others. Returns the loss of what is trained now."""
        number = next((number for number, each in enumerate(self.step) if each is batch), None)
        if number is None or (len(self.step) == 1 and self.layers is None):
            return train(batch)
        if not self.groups:
            self.groups, self._states = list(self._grouped(trainer)), self._lockstep.seeded(len(self.step))
            self._set_place(StepPlace(int(torch.randint(2**62, (), device="cpu"))))
        group = next(group for group in self.groups if number in group)
        if number != group[-1]:
            return torch.zeros((), device=trainer.args.device)
        loss = self._train(trainer, group, train)
        assert self._place is not None
        self._place.first_row, self._place.rows = self._place.first_row + self._place.rows, 0
        if group is self.groups[-1]:
            self._set_place(None)
        return loss

    def _train(self, trainer: Any, group: list[int], train: Callable[[Any], Tensor]) -> Tensor:
        works, states = [partial(train, self.step[each]) for each in group], [self._states[each] for each in group]
        if self.layers is None or (len(group) == 1 and not self._by_layers):
            with self._lockstep.random_numbers(states[0]):
                return works[0]()
        tokens = sum(_tokens_of(self.step[each]) for each in group)
        stored = 0 if self.layers.away.on or keeps_scores(trainer.model) else self.layers.stored.fitting(tokens)
        if self.ranks is not None:  # a layer's experts exchange tokens in each of its passes
            stored = min(other for (other,) in self.ranks.numbers(stored))
        # DDP's graph ends at each layer
        with trainer.accelerator.no_sync(trainer.model_wrapped), self._training.kept():
            return torch.stack(self.layers.run(works, states, tokens, stored)).sum()

    def _set_place(self, place: StepPlace | None) -> None:
        self._place = place
        for module in self._experts:
            module.place = place

    @property
    def _by_layers(self) -> bool:
        """Whether even one micro-batch goes layer by layer."""
        return self._alone or (self.layers is not None and self.layers.away.on)

    @property
    def shared(self) -> bool:
        """Whether micro-batches of the present step went layer by layer, so that DDP has not seen their gradients."""
        return self.layers is not None and any(len(group) > 1 or self._by_layers for group in self.groups)

    def _grouped(self, trainer: Any) -> Iterator[list[int]]:
        """The numbers of neighbours that fit together."""
        sizes = [_tokens_of(batch) for batch in self.step]
        if self.ranks is not None:
            sizes = [max(each) for each in zip(*self.ranks.numbers(*sizes), strict=True)]
        if self.count is None and self.tokens is None:
            self.tokens = self._room(trainer, max(sizes))
            setattr(trainer, TOKENS, self.tokens)
            _tell(self.tokens, sizes)
        wanted = min(sum(sizes), self._together_at_most(sizes))
        if self.layers is not None and wanted > self._most * (1 + SPARE_SHARE):
            self._most = wanted
            self._choose_place(trainer, max(sizes), wanted)
        group: list[int] = []
        taken = 0
        for number, size in enumerate(sizes):
            full = len(group) == self.count if self.count is not None else taken + size > (self.tokens or 0)
            if group and full:
                yield group
                group, taken = [], 0
            group, taken = [*group, number], taken + size
        yield group

    def _room(self, trainer: Any, most: int) -> int:
        """How many tokens may go together, by the memory that is free now. `most` is the most of one micro-batch."""
        each, (room, is_gpu) = _token_bytes(trainer.model, self.step), _room_of(trainer)
        room -= _once(trainer, self.step, most)
        fitting, host = room // each.waiting, int(available_memory() * HOST_SHARE)
        if is_gpu and each.host:
            fitting = max(fitting, min(room // each.away, host // each.host))
        fitting = max(fitting, most)
        if is_gpu and fitting < sum(map(_tokens_of, self.step)):
            _logger.info(
                "not all micro-batches of a step can wait for each other in %s of GPU memory and %s of host memory",
                readable(max(room, 0)), readable(host),
            )  # fmt: skip
        return fitting if self.ranks is None else min(fit for (fit,) in self.ranks.numbers(fitting))

    def _choose_place(self, trainer: Any, most: int, tokens: int) -> None:
        """Let what waits for backward go to host memory, if so many tokens together do not fit otherwise.

        This is asked again only for more tokens than the memory that was left free then can hold.
        """
        assert self.layers is not None
        each, (room, is_gpu) = _token_bytes(trainer.model, self.step), _room_of(trainer)
        short = is_gpu and each.host > 0 and tokens * each.waiting + _once(trainer, self.step, most) > room
        if self.ranks is not None:  # all ranks go layer by layer, or none
            short = any(other for (other,) in self.ranks.numbers(int(short)))
        away = self.layers.away
        if short:
            away.host.limit = max(away.host.limit, away.host.bytes + int(available_memory() * HOST_SHARE))
        if short and not away.on:
            _logger.info(
                "what waits for backward waits in host memory, since GPU memory is short: %s for %s tokens",
                readable(tokens * each.host), f"{tokens:,}",
            )  # fmt: skip
        away.on = away.on or short


class _TokenBytes(NamedTuple):
    """Bytes that a token takes: while its micro-batch waits for others, with all of it on the GPU, or with what waits
    in host memory; and there (0 if nothing may go there).
    """

    waiting: int
    away: int
    host: int


def _token_bytes(model: Any, step: Sequence[Any]) -> _TokenBytes:
    config = model.config.get_text_config()
    longest = max((each.shape[-1] for batch in step for each in _ids_of(batch)), default=0)
    scores = score_bytes(heads_of(config), longest, True) if keeps_scores(model) else 0
    layers = sum(len(model.get_submodule(name)) for name in decoder_lists(model))
    checkpointing = any(getattr(each, "gradient_checkpointing", False) for each in model.modules())
    sizes = config.hidden_size, next(model.parameters()).element_size()
    return _TokenBytes(
        waiting_bytes(sizes[0], layers, sizes[1], checkpointing, scores),
        away_bytes(*sizes, scores),
        host_bytes(sizes[0], layers, sizes[1]) if checkpointing else 0,
    )


def _once(trainer: Any, step: Sequence[Any], most: int) -> int:
    """Bytes that one micro-batch after the other takes, of at most so many tokens: attention's scores, or the loss."""
    loss = loss_room(trainer, most)
    if not keeps_scores(trainer.model):
        return loss
    heads = heads_of(trainer.model.config.get_text_config())
    shapes = ((each.shape[:-1].numel(), each.shape[-1]) for batch in step for each in _ids_of(batch))
    return max(loss, *(score_work(heads, *shape, True) for shape in shapes))


def _room_of(trainer: Any) -> tuple[int, bool]:
    """The bytes that micro-batches may take beside what training has or will have, and whether they are a GPU's."""
    model = trainer.model
    device = device_of(next(model.parameters()).device)
    free, reserved = device.free_bytes(), device.memory_reserved()
    if free is None:
        return available_memory() // 2, False
    steady = device.memory_allocated() + _coming(trainer)
    return free[0] + reserved - steady - spare_bytes(steady), True


def _coming(trainer: Any) -> int:
    """Bytes that the first step will take for good beside what depends on tokens: gradients, moments, and memory for
    experts and other weights that are streamed.
    """
    model = trainer.model
    lanes = next((each.laned.lanes for each in find_experts(model).values() if each.laned is not None), None)
    streamed = LANE_BYTES if lanes is not None and lanes.running is None else 0
    kind = next(model.parameters()).device.type
    trained = 0 if trainer.optimizer.state else _elements(model, kind)
    return streamed + coming_bytes(model) + trained * FP32 * (1 + ADAM_STATES)


def _elements(model: nn.Module, kind: str) -> int:
    """The trained elements on a kind of device."""
    return sum(each.numel() for each in model.parameters() if each.requires_grad and each.device.type == kind)


def _why_not(trainer: Any) -> str | None:
    """Why the layers of a model cannot be run one by one; None if they can."""
    model = trainer.model
    reasons = (
        (is_divided(model), "its layers are divided by FSDP2, and gathered for one micro-batch at a time"),
        (tp_size_of(model) > 1, "the attention is tensor parallel"),
        (trainer.args.torch_compile, "torch_compile is on"),
        (getattr(trainer.args, "activation_offloading", False), "activation_offloading is on"),
        (
            type(trainer)._prepare_inputs is not transformers.Trainer._prepare_inputs,
            f"{type(trainer).__name__} prepares its inputs by code of its own, which may call the model",
        ),
    )
    return next((why for holds, why in reasons if holds), obstacle(model))


def _ids_of(batch: Any) -> list[Tensor]:
    """The tokens of a micro-batch, padding included."""
    found = batch.items() if isinstance(batch, Mapping) else ()
    return [each for name, each in found if str(name).endswith("input_ids") and isinstance(each, Tensor)]


def _tokens_of(batch: Any) -> int:
    """How many tokens a micro-batch has, padding included; of every sequence in it."""
    return sum(each.numel() for each in _ids_of(batch))


def _tell(tokens: int, sizes: Sequence[int]) -> None:
    count = min(len(sizes), tokens // max(max(sizes), 1))
    _logger.info(
        "%d of a step's %d micro-batches go through each layer together, so that an expert is needed once for all of "
        "them: memory is left for %s tokens",
        count, len(sizes), f"{tokens:,}",
    )  # fmt: skip
