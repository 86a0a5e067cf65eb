"""Layers that keep their activations under gradient checkpointing, against the same layers run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from adapted import randomize
from given import Checkpoint
from host_graphs import record_on_host
from lanes import no_calibration
from tiny import FAMILIES, MORE_FAMILIES
from tiny_newer import SEE_IMAGES
from torch import Tensor, nn
from transformers import Trainer

from ktft.device import Device, device_of
from ktft.model.layer_order import decoder_layers
from ktft.model.memory import VRAM_FRAGMENTS
from ktft.model.stored import SEEN, StoredActivations

__all__ = ["no_calibration"]

pytestmark = pytest.mark.usefixtures("no_calibration")
GIB = 1 << 30


class Counted:
    """How often each decoder layer of the last model ran in each step."""

    def __init__(self) -> None:
        self.steps: list[list[int]] = []

    def watch(self, trainer: Trainer) -> None:
        layers, self.steps = list(decoder_layers(trainer.model).values()), []
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, number=number: self._add(number))
        self._layers = len(layers)

    def begin(self) -> None:
        self.steps.append([0] * self._layers)

    def _add(self, number: int) -> None:
        self.steps[-1][number] += 1


def train(path: Path, out: Path, steps: int, micro_batches: int = 1, **settings: Any) -> Any:
    """The losses of some steps, the trained weights after them, and how often each layer ran in each step."""
    counted = Counted()

    class Watching(Trainer):
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            counted.begin()
            return super().get_batch_samples(*args, **kwargs)

    lora = {"lora_dropout": settings.pop("lora_dropout", 0.0)}
    model = randomize(runs.adapted(path, settings=settings.pop("kt", {}), **lora), std=0.05)
    torch.manual_seed(1)
    rows = [torch.randint(3, 100, (length,)) for length in [12, 9] * (steps * micro_batches)]
    data = [{"input_ids": ids, "labels": ids} for ids in rows]
    given = {"max_steps": steps, "per_device_train_batch_size": 1, "gradient_accumulation_steps": micro_batches}
    given |= {"save_strategy": "no", "gradient_checkpointing": True, "learning_rate": 1e-3}
    trainer = Watching(model, runs.arguments(out, **given | settings), train_dataset=data)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)  # type: ignore[method-assign]
    counted.watch(trainer)
    trainer.train()
    weights = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    return runs.losses(trainer), weights, counted.steps


def assert_same(again: Any, stored: Any) -> None:
    """The same losses and weights, bit for bit."""
    assert again[0] == stored[0] and len(set(again[0])) > 1
    assert all(torch.equal(stored[1][name], weight) for name, weight in again[1].items())


def store(monkeypatch: pytest.MonkeyPatch, *counts: int) -> None:
    """So many layers keep their activations, in one group of micro-batches after the other."""
    left = list(counts)
    monkeypatch.setattr(StoredActivations, "fitting", lambda self, tokens: left.pop(0) if left else counts[-1])


BY_DEFAULT = {"dsv3", "gpt_oss", "qwen3_5_text"}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in BY_DEFAULT else pytest.mark.full)
        for family in sorted({*FAMILIES, *MORE_FAMILIES} - SEE_IMAGES)
    ],
)
@pytest.mark.parametrize("lanes", [False, True], ids=["cpu", "lanes"])
def test_same_training(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, lanes: bool
) -> None:
    """Without one, one and all layers that keep them, micro-batches together, with dropout on attention and experts."""
    path, settings = tiny_checkpoint(family), {"micro_batches": 2, "lora_dropout": 0.2}
    if lanes:
        monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
        settings["kt"] = {"placement": "stream", "gpu_expert_memory": 0}
    again = train(path, tmp_path / "again", 4, **settings)
    layers = len(again[2][0])
    assert again[2] == [[4] * layers] * 4
    store(monkeypatch, 0, 1, layers)
    stored = train(path, tmp_path / "stored", 4, **settings)
    assert_same(again, stored)
    assert stored[2] == [[4] * layers, [4] * (layers - 1) + [2], *[[2] * layers] * 2]


def test_a_step_of_one_micro_batch(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small layers are recorded rather than stored; large ones are not recorded once they can be stored."""
    path = tiny_checkpoint("dsv3")
    graphs = record_on_host(monkeypatch.setattr)
    recorded = train(path, tmp_path / "recorded", 6)
    replays = sum(graph.replays for graph in graphs)
    assert replays
    store(monkeypatch, 0, 0, 0, 3)
    del graphs[:]
    same = train(path, tmp_path / "small", 6)
    assert_same(recorded, same)
    assert sum(graph.replays for graph in graphs) == replays
    monkeypatch.setattr("ktft.model.layer_order.SMALLEST", 9 * 64 * 4)  # batches have 12 and 9 tokens in turn
    stored = train(path, tmp_path / "large", 6)
    assert recorded[0] == pytest.approx(stored[0], rel=1e-5)
    assert stored[2][4] == [1] * 3
