"""What waits for backward in host memory, against the same training with all of it on the device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from adapted import randomize
from given import Checkpoint
from host_graphs import HostGraph, record_on_host
from torch import Tensor, nn
from transformers import Trainer

from ktft.device import Device, HostEvent, HostStream, device_of
from ktft.lanes.kept import KeptOutputs
from ktft.model import away as away_module
from ktft.model.away import Away, HostStack, away_bytes, host_bytes
from ktft.model.memory import waiting_bytes
from ktft.train.step_order import StepOrder

STEPS, MICRO_BATCHES = 3, 3
CPU = device_of(torch.device("cpu"))


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's torch does a GPU's part. All experts run there, because where they run depends on timings."""
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    monkeypatch.setattr(away_module, "SLAB", 10_000)  # so that most tensors lie in several


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "free_bytes", lambda self: (0, 1 << 30))


class Sent:
    """What went away, by weak references to the memory on the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inputs: list[weakref.ref[Tensor]] = []
        self.kept = self.stayed = 0
        self.orders: list[Away] = []
        send, send_kept, original = Away.send, Away.send_kept, Away.begin

        def sending(this: Away, number: int, places: Any) -> None:
            seen = weakref.ref(places[0][0][places[0][1]])
            send(this, number, places)
            if seen() is None:
                self.inputs.append(seen)
            else:
                self.stayed += 1

        def sending_kept(this: Away, number: int, outputs: KeptOutputs) -> None:
            before = len(this._leaving)
            send_kept(this, number, outputs)
            self.kept += len(this._leaving) - before

        def begin(this: Away) -> None:
            self.orders.append(this)
            original(this)

        monkeypatch.setattr(Away, "send", sending)
        monkeypatch.setattr(Away, "send_kept", sending_kept)
        monkeypatch.setattr(Away, "begin", begin)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(monkeypatch)


def steps(
    path: Path, out: Path, *, lengths: tuple[int, ...] = (12,), cls: type[Trainer] = Trainer, **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps, and the trained weights after them."""
    own = {"placement": "stream", "gpu_expert_memory": 0} | settings.pop("kt", {})
    model = randomize(runs.adapted(path, settings=own, lora_dropout=settings.pop("lora_dropout", 0.2)), std=0.05)
    torch.manual_seed(1)
    rows = [torch.randint(3, 100, (lengths[at % len(lengths)],)) for at in range(STEPS * MICRO_BATCHES)]
    data = [{"input_ids": ids, "labels": ids} for ids in rows]
    given = {"max_steps": STEPS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": MICRO_BATCHES}
    given |= {"save_strategy": "no", "gradient_checkpointing": True, "learning_rate": 1e-3}
    trainer = cls(model, runs.arguments(out, **given | settings), train_dataset=data)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)  # type: ignore[method-assign]
    trainer.train()
    return runs.losses(trainer), {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def assert_same(here: tuple[list[float], dict[str, Tensor]], away: tuple[list[float], dict[str, Tensor]]) -> None:
    """The same losses and weights, bit for bit."""
    assert here[0] == away[0] and len(set(here[0])) > 1
    assert all(torch.equal(away[1][name], weight) for name, weight in here[1].items())


@pytest.mark.parametrize("family", ["dsv3", "qwen3_5", "gpt_oss"])
@pytest.mark.parametrize("recorded", [False, True])
def test_same_training(
    tiny_checkpoint: Checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    sent: Sent,
    family: str,
    recorded: bool,
) -> None:
    """With dropout, and micro-batches of different lengths."""
    path, lengths = tiny_checkpoint(family), (12,) if recorded else (12, 9, 5)
    graphs: list[HostGraph] = record_on_host(monkeypatch.setattr) if recorded else []
    here = steps(path, tmp_path / "here", lengths=lengths)
    assert not sent.inputs
    request.getfixturevalue("no_room")
    away = steps(path, tmp_path / "away", lengths=lengths, kt={"micro_batches_together": MICRO_BATCHES})
    assert_same(here, away)
    assert bool(graphs) == recorded
    print(len(sent.inputs), sent.kept, sent.stayed, sent.orders[-1].host.bytes)
