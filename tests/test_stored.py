"""Layers that keep their activations under gradient checkpointing, against the same layers run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from adapted import randomize
from given import Checkpoint, RunCli, TrainYaml
from host_graphs import record_on_host
from lanes import no_calibration
from tiny import FAMILIES, MORE_FAMILIES
from tiny_newer import SEE_IMAGES
from transformers import Trainer

from ktft.device import Device, device_of
from ktft.lanes.gpu.steady import SteadyLane
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


@pytest.mark.parametrize("stored", [False, True])
def test_same_training_with_gate_and_up_kept(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """By one layer and by all, of layers that are run again and that are not, micro-batches together."""
    path, asked = tiny_checkpoint("qwen3moe"), list[int]()
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    settings = {"micro_batches": 2, "kt": {"placement": "stream", "gpu_expert_memory": 0}}
    store(monkeypatch, 9 if stored else 0)
    again = train(path, tmp_path / "again", 5, **settings)
    original, kept = SteadyLane.backward, list[bool]()

    def noted(*args: Any) -> Any:
        kept.append(args[-1] is not None)
        return original(*args)

    def fitting(self: StoredActivations, tokens: int, count: int, each: int) -> int:
        asked.append(each)
        return (0, 1, 9)[min(len(asked) - 1, 2)]

    monkeypatch.setattr(SteadyLane, "backward", noted)
    monkeypatch.setattr(StoredActivations, "fitting_gates", fitting)
    assert_same(again, train(path, tmp_path / "kept", 5, **settings))
    layers = len(again[2][0])
    assert sum(kept) >= 1 + layers and sum(asked[:2]) + asked[2] > 0
    assert asked[:2] == [0, 0] and asked[2] > 0


def test_recorded_layers_are_run_again(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps with one micro-batch, of 12 and 9 tokens in turn, those whose layers are too large to be recorded."""
    path = tiny_checkpoint("dsv3")
    graphs = record_on_host(monkeypatch.setattr)
    recorded = train(path, tmp_path / "recorded", 6)
    replays = sum(graph.replays for graph in graphs)
    assert replays
    store(monkeypatch, 0, 0, 0, 3)
    del graphs[:]
    assert_same(recorded, train(path, tmp_path / "small", 6))
    assert sum(graph.replays for graph in graphs) == replays
    monkeypatch.setattr("ktft.model.recorder.LARGEST_RECORDED", 9 * 64 * 4)
    store(monkeypatch, 0, 0, 0, 3)
    stored = train(path, tmp_path / "large", 6)
    assert recorded[0] == pytest.approx(stored[0], rel=1e-5)
    assert [max(step) for step in stored[2]] == [2, 2, 2, 4, 1, 0]  # of 9 tokens they are recorded, then played back


def test_memory_decides(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """In a training: first none, then one, then as many as fit."""
    each = int(40 * GIB / (2.5 * 21 * (1 + VRAM_FRAGMENTS)))  # bytes for a layer's activations of one of 21 tokens
    allocated = [0]
    monkeypatch.setattr(Device, "memory_allocated", lambda self: allocated[0])
    monkeypatch.setattr(Device, "free_bytes", lambda self: (41 * GIB, 80 * GIB))  # 1 GiB stays free
    take, end = StoredActivations.take, StoredActivations.end

    def taking(this: StoredActivations, number: int, given: Any) -> bool:
        before = this._stored.total()
        found = take(this, number, given)
        allocated[0] += each * (this._stored.total() - before)
        return found

    def ending(this: StoredActivations) -> None:
        allocated[0] = 0
        end(this)

    monkeypatch.setattr(StoredActivations, "take", taking)
    monkeypatch.setattr(StoredActivations, "end", ending)
    again = train(tiny_checkpoint("dsv3"), tmp_path / "none", 6, micro_batches=2, kt={"gpu_activation_memory": 0})
    assert again[2] == [[4, 4, 4]] * 6
    stored = train(tiny_checkpoint("dsv3"), tmp_path / "auto", 6, micro_batches=2)
    assert_same(again, stored)
    assert stored[2] == [*[[4, 4, 4]] * SEEN, [4, 4, 2], *[[4, 2, 2]] * 2]
    assert "2 of 3 layers keep their activations in 30.2 GiB of free GPU memory" in caplog.text
    alone = train(tiny_checkpoint("dsv3"), tmp_path / "alone", 6, kt={"cuda_graphs": False})
    assert alone[2] == [*[[2, 2, 2]] * SEEN, [2, 2, 1], *[[1, 1, 1]] * 2]


class Memory(Device):
    """A device of which so many bytes are in use, and so many are torch's."""

    capacity, allocated, reserved = 80 * GIB, 10 * GIB, 12 * GIB

    def free_bytes(self) -> tuple[int, int]:
        return self.capacity - self.reserved, self.capacity

    def memory_allocated(self) -> int:
        return self.allocated

    def memory_reserved(self) -> int:
        return self.reserved


LAYERS, TOKENS = 48, 1000


def group(stored: StoredActivations, device: Memory, tokens: int, waiting: int, each: int, recorded: int = 0) -> int:
    """A group of micro-batches in a step of its own; returns how many layers keep their activations.

    Args:
        waiting: bytes that a token has waiting when the loss is known, beside `each` of every layer that keeps its own.
        recorded: the last layers, which are recorded.
    """
    stored.begin_step()
    count = stored.fitting(tokens)
    before = device.allocated
    stored.begin(tokens, count)
    given = [torch.zeros(1, tokens, 8, requires_grad=True), "sdpa"]
    kept = sum(stored.take(number, given) for number in range(LAYERS - recorded))
    device.allocated += tokens * (waiting + each * kept)
    stored.see_loss()
    device.allocated = before
    stored.end()
    return count


def made(memory: int | str = "auto") -> tuple[StoredActivations, Memory]:
    device = Memory(torch.device("cpu"))
    return StoredActivations(device, LAYERS, memory), device


def test_as_many_as_fit() -> None:
    stored, device = made()
    each = int(GIB / TOKENS)
    counts = [group(stored, device, TOKENS, 500_000, each) for _ in range(SEEN + 3)]
    # 12 GiB are needed, a quarter of which stays free
    most = int((80 - 12 - 3) / (1 + VRAM_FRAGMENTS))
    assert counts == [0] * SEEN + [1] + [min(most, LAYERS)] * 2
    device.allocated, device.reserved = 40 * GIB, 45 * GIB  # experts stay now
    assert group(stored, device, TOKENS, 500_000, each) == int((80 - 42 - 42 / 4) / (1 + VRAM_FRAGMENTS)) < LAYERS
    twice = (80 - 44 - 44 / 4) / 2 / (1 + VRAM_FRAGMENTS)
    assert group(stored, device, 2 * TOKENS, 500_000, each) == int(twice)
    device.allocated = 70 * GIB
    assert group(stored, device, TOKENS, 500_000, each) == 0


def test_what_a_layer_keeps_is_seen_better_in_more_layers() -> None:
    stored, device = made()
    for _ in range(SEEN):
        group(stored, device, TOKENS, 500_000, GIB // TOKENS)
    assert group(stored, device, TOKENS, 600_000, 5 * GIB // TOKENS) == 1  # something else was made meanwhile
    few = group(stored, device, TOKENS, 500_000, GIB // TOKENS)
    assert 1 < few < 13 and group(stored, device, TOKENS, 500_000, GIB // TOKENS) == LAYERS


def test_layers_that_are_recorded_say_nothing() -> None:
    """What they take once is not what a layer keeps."""
    stored, device = made()
    for _ in range(SEEN):
        group(stored, device, TOKENS, 500_000, 0)
    assert [group(stored, device, TOKENS, 500_100, 0, recorded=LAYERS) for _ in range(3)] == [1] * 3


def test_the_setting_limits_them() -> None:
    assert [group(*made(0), TOKENS, 1000, GIB // TOKENS) for _ in range(6)] == [0] * 6
    stored, device = made(5 * GIB)
    counts = [group(stored, device, TOKENS, 1000, GIB // TOKENS) for _ in range(SEEN + 2)]
    assert counts == [0] * SEEN + [1, int(5 / (1 + VRAM_FRAGMENTS))]
    stored = StoredActivations(device_of(torch.device("cpu")), LAYERS, "auto")
    for _ in range(SEEN + 1):
        stored.begin_step()
        assert stored.fitting(TOKENS) == 0  # whose memory is not a GPU's
        stored.begin(TOKENS, 0)
        stored.end()


def test_a_command(train_yaml: TrainYaml, fork_cli: RunCli, tmp_path: Path) -> None:
    losses = []
    for number, own in enumerate(({}, {"gpu_activation_memory": 0})):
        out, common = tmp_path / str(number), {"expert_format": "bf16", "threads": 1, "gpu_memory": "64G"}
        steps = {"max_steps": 6, "logging_steps": 1, "gradient_accumulation_steps": 2}
        config = train_yaml("dsv3", kt_config=common | own, output_dir=str(out), **steps)
        fork_cli(["llamafactory-cli", "train"], config, env={"KTFT_EMULATE_GPU": "1"})
        losses.append([each["loss"] for each in runs.logged(out)])
    assert losses[0] == losses[1] and len(losses[0]) == 6
    config["kt_config"] |= {"gpu_activation_memory": "much"}
    done = fork_cli(["llamafactory-cli", "train"], config, env={"KTFT_EMULATE_GPU": "1"}, check=False)
    assert done.returncode == 2 and "gpu_activation_memory is 'much'; give a size, for instance 8G" in done.stdout


@pytest.mark.parametrize("recorded", [0, LAYERS])
def test_gate_and_up_take_what_activations_leave(recorded: int) -> None:
    """Nothing until it is known what layers keep; then one layer shows what gate and up take; then as many as fit."""
    stored, device = made()
    for _ in range(SEEN + (1 if recorded else 2)):
        assert stored.fitting_gates(TOKENS, 0, GIB // TOKENS) == 0
        group(stored, device, TOKENS, 500_000, GIB // TOKENS // 2, recorded)
    count = 0 if recorded else LAYERS
    assert stored.fitting_gates(TOKENS, count, 0) == 1
    left = 80 - 12 - 3 - count / 2 * (1 + VRAM_FRAGMENTS)
    assert stored.fitting_gates(TOKENS, count, GIB // TOKENS) == min(LAYERS, int(left / (1 + VRAM_FRAGMENTS)))
    if not recorded:
        assert stored.fitting_gates(TOKENS, LAYERS - 1, GIB // TOKENS) == 0
    device.reserved = device.allocated = 75 * GIB
    assert stored.fitting_gates(TOKENS, count, GIB // TOKENS) == stored.fitting_gates(TOKENS, count, 0) == 0


def test_the_setting_limits_gate_and_up() -> None:
    for memory, expected in ((5 * GIB, int(5 / (1 + VRAM_FRAGMENTS))), (0, 0)):
        stored, device = made(memory)
        for _ in range(SEEN + 1):
            group(stored, device, TOKENS, 1000, GIB // TOKENS, recorded=LAYERS)
        assert stored.fitting_gates(TOKENS, 0, GIB // TOKENS) == expected


def test_gate_and_up_do_not_count_as_activations() -> None:
    """What a layer keeps is not learned from groups whose layers keep gate and up; they are told as stored bytes."""
    stored, device = made()
    for _ in range(SEEN + 2):
        group(stored, device, TOKENS, 500_000, GIB // TOKENS)
    count = stored.fitting(TOKENS)
    stored.begin(TOKENS, count, 10, 1000)
    assert stored.bytes == 10 * 1000 * TOKENS
    device.allocated += 40 * GIB
    stored.see_loss()
    device.allocated -= 40 * GIB
    stored.end()
    assert stored.fitting(TOKENS) == count and stored.bytes == 0


def test_groups_that_are_not_recorded_teach_what_a_layer_keeps() -> None:
    """Even if gate and up were kept of as many tokens in groups that were."""
    stored, device = made()
    for _ in range(SEEN + 1):
        group(stored, device, TOKENS, 500_000, 0, recorded=LAYERS)
    assert stored.fitting_gates(TOKENS, 1, 1000) == LAYERS
    assert stored.fitting_gates(TOKENS + 1, 1, 1000) == 0
    each = GIB // TOKENS // 4
    for _ in range(2):  # gate and up of all layers, 12 GiB, look like one layer's activations
        stored.begin_step()
        gates = stored.fitting_gates(TOKENS, stored.fitting(TOKENS), each)
        stored.begin(TOKENS, stored.fitting(TOKENS), gates, each)
        kept = sum(stored.take(number, [torch.zeros(1, TOKENS, 8, requires_grad=True)]) for number in range(LAYERS))
        device.allocated += TOKENS * (500_000 + each * (kept + gates))
        stored.see_loss()
        device.allocated = 10 * GIB
        stored.end()
        assert (kept, gates) in ((1, LAYERS), (5, 0))
    assert stored.fitting(TOKENS) == LAYERS and stored.fitting_gates(TOKENS, LAYERS, each) == 0
    assert group(stored, device, TOKENS, 500_000, each) == LAYERS
    assert stored.fitting_gates(TOKENS, LAYERS, each) == LAYERS
