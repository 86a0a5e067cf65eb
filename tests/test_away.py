"""What waits for backward in host memory, against the same training with all of it on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from adapted import randomize
from host_graphs import record_on_host
from lanes import no_calibration
from tiny import write_checkpoint
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import Trainer

from ktft.device import Device, HostEvent, HostStream, device_of
from ktft.lanes.kept import KeptOutputs
from ktft.model import away as away_module
from ktft.model.away import Away, HostStack, away_bytes, host_bytes
from ktft.model.memory import waiting_bytes
from ktft.train.step_order import StepOrder

__all__ = ["no_calibration"]

pytestmark = pytest.mark.usefixtures("no_calibration")
STEPS, MICRO_BATCHES, LAYERS = 3, 3, 6
HYBRID = ["linear_attention", "full_attention"] * (LAYERS // 2)
FAMILIES: dict[str, dict[str, Any]] = {"dsv3": {}, "qwen3_5_text": {"layer_types": HYBRID}, "qwen3moe": {}}
BY_DEFAULT, FULL = {("dsv3", "recorded"), ("qwen3_5_text", "plain")}, pytest.mark.full
CPU = device_of(torch.device("cpu"))
SMALL = 10_000
"""Bytes of a slab here, so that most tensors lie in several."""


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's torch does a GPU's part."""
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    monkeypatch.setattr(away_module, "SLAB", SMALL)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`deep(family)` -> a checkpoint with `LAYERS` layers, made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            own = {"num_hidden_layers": LAYERS} | FAMILIES[family]
            made[family] = write_checkpoint(family, tmp_path_factory.mktemp(family), **own)
        return made[family]

    return make


def leave(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """So many bytes of the device are free for training."""
    spare = 1 << 30
    monkeypatch.setattr(Device, "free_bytes", lambda self: (spare + room, 2 * spare))


class Watched:
    """What goes away in all trainings of a test.

    Attributes:
        freed: number of a layer's call -> whether the device's memory of each tensor that went was freed by then.
        fetched: copies back from the host.
        late: those of them that did not begin before their layer's turn came.
        used: bytes of host memory, after each group.
        slabs: where the host memory was, after each group.
        last: the `Away` of the last training.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.freed: dict[int, list[bool]] = {}
        self.fetched = self.late = 0
        self.used, self.slabs = list[int](), list[list[int]]()
        self.last: Any = None
        memory: dict[int, list[StorageWeakRef]] = {}
        copy, release, fetch, back, end = Away._copy, Away.release, Away.fetch, Away.back, Away.end

        def copying(this: Away, number: int, places: Any, source: Tensor, leaf: bool) -> bool:
            memory.setdefault(number, []).append(StorageWeakRef(source.untyped_storage()))
            return copy(this, number, places, source, leaf)

        def releasing(this: Away, number: int) -> None:
            release(this, number)
            for each in [each for each in memory if each <= number]:
                self.freed.setdefault(each, []).extend(ref.expired() for ref in memory.pop(each))

        def fetching(this: Away, number: int) -> None:
            before = {id(each): each.target for each in this._sent.get(number, [])}
            fetch(this, number)
            self.fetched += sum(each.target is not before[id(each)] for each in this._sent.get(number, []))

        def coming_back(this: Away, number: int) -> None:
            before = self.fetched
            back(this, number)
            self.late += self.fetched - before

        def ending(this: Away) -> None:
            end(this)
            memory.clear()
            self.last = this
            self.used.append(this.host.bytes)
            self.slabs.append([slab.data_ptr() for slab in this.host._slabs])

        wrappers = {"_copy": copying, "release": releasing, "fetch": fetching, "back": coming_back, "end": ending}
        for name, wrapper in wrappers.items():
            monkeypatch.setattr(Away, name, wrapper)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def steps(
    path: Path, out: Path, *, lengths: tuple[int, ...] = (12,), cls: type[Trainer] = Trainer, **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of some steps, and the trained weights after them."""
    # All experts are streamed, because where they run otherwise depends on timings
    own = {"placement": "stream", "gpu_expert_memory": 0} | settings.pop("kt", {})
    model = randomize(runs.adapted(path, settings=own, lora_dropout=0.2), std=0.05)
    torch.manual_seed(1)
    rows = [torch.randint(3, 100, (lengths[at % len(lengths)],)) for at in range(STEPS * MICRO_BATCHES)]
    data = [{"input_ids": ids, "labels": ids} for ids in rows]
    given = {"max_steps": STEPS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": MICRO_BATCHES}
    given |= {"save_strategy": "no", "gradient_checkpointing": True, "learning_rate": 1e-3}
    trainer = cls(model, runs.arguments(out, **given | settings), train_dataset=data)
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)  # type: ignore[method-assign]
    trainer.train()
    return runs.losses(trainer), {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


ALL = {"kt": {"micro_batches_together": MICRO_BATCHES}}


def assert_same(here: tuple[list[float], dict[str, Tensor]], away: tuple[list[float], dict[str, Tensor]]) -> None:
    """The same losses and weights, bit for bit."""
    assert here[0] == away[0] and len(set(here[0])) > 1
    assert all(torch.equal(away[1][name], weight) for name, weight in here[1].items())


# --- trainings --------------------------------------------------------------------------------------------------------


# By default the family whose layers are alike has the recording, and the one with two kinds of layers goes without
@pytest.mark.parametrize(
    ("family", "recorded"),
    [
        pytest.param(family, recorded, id=f"{family}-{name}", marks=() if (family, name) in BY_DEFAULT else FULL)
        for family in FAMILIES
        for name, recorded in (("plain", False), ("recorded", True))
    ],
)
def test_same_training(
    deep: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    watched: Watched,
    family: str,
    recorded: bool,
) -> None:
    """With dropout on attention and experts, and micro-batches of different lengths."""
    path, lengths = deep(family), (12, 12, 9)
    graphs = record_on_host(monkeypatch.setattr) if recorded else []
    here = steps(path, tmp_path / "here", lengths=lengths, **ALL)
    assert not watched.used[-1]
    leave(monkeypatch, 0)
    away = steps(path, tmp_path / "away", lengths=lengths, **ALL)
    assert_same(here, away)
    assert not recorded or max(graph.replays for graph in graphs) > 0
    # Of the first layer's input, the model keeps the embedding; those at the top are needed again at once
    assert set(watched.freed) >= set(range(1, LAYERS - 2)) and all(map(all, watched.freed.values()))
    experts = 1  # their outputs are one tensor for all micro-batches
    assert watched.fetched >= STEPS * (LAYERS - 3) * (MICRO_BATCHES + experts) and not watched.late
    assert watched.used[-1] and len(set(map(tuple, watched.slabs[-STEPS:]))) == 1


def test_nothing_goes_from_layers_that_are_not_run_again(
    deep: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    leave(monkeypatch, 0)
    steps(deep("dsv3"), tmp_path, gradient_checkpointing=False, **ALL)
    assert watched.used and not any(watched.used)


def test_a_failing_micro_batch_leaves_nothing_behind(
    deep: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watched: Watched
) -> None:
    class Failing(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise ArithmeticError("a loss that cannot be")

    leave(monkeypatch, 0)
    with pytest.raises(ArithmeticError, match="a loss that cannot be"):
        steps(deep("dsv3"), tmp_path, cls=Failing, **ALL)
    assert not watched.used[-1] and not watched.last._sent  # the loss comes before the first layer's end

    class FailingLater(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            super().compute_loss(*args, **kwargs)
            raise ArithmeticError("a loss that cannot be")

    with pytest.raises(ArithmeticError, match="a loss that cannot be"):
        steps(deep("dsv3"), tmp_path, cls=FailingLater, **ALL)
    last = watched.last
    assert watched.used[-1] and not (last._sent or last._kept or last._leaving or last.host._at)


def test_it_goes_where_memory_is_short(
    deep: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    watched: Watched,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As much as fits stays; more micro-batches go together when what waits is away; the bits are those of all here."""
    monkeypatch.setattr("ktft.train.step_order._coming", lambda trainer: 0)
    path, tokens = deep("dsv3"), 12
    here, there = waiting_bytes(64, LAYERS, 4, True), away_bytes(64, 4)
    logits = tokens * 320 * 16
    assert there < here
    groups: list[list[list[int]]] = []
    grouped = StepOrder._grouped
    monkeypatch.setattr(
        StepOrder, "_grouped", lambda *given: iter(groups.append(found := list(grouped(*given))) or found)
    )
    whole = steps(path, tmp_path / "whole")
    leave(monkeypatch, 3 * tokens * here + logits)
    fits = steps(path, tmp_path / "fits")
    assert not any(watched.used) and "waits in host memory" not in caplog.text
    leave(monkeypatch, 3 * tokens * there + logits)
    away = steps(path, tmp_path / "away")
    assert all(watched.used[-STEPS:]) and "what waits for backward waits in host memory" in caplog.text
    assert groups == [[[0, 1, 2]]] * 3 * STEPS
    assert_same(whole, fits)
    assert_same(whole, away)
    monkeypatch.setattr("ktft.train.step_order.available_memory", lambda: 10_000)  # half of it holds 1 token
    steps(path, tmp_path / "neither")
    assert groups[-1] == [[0, 1], [2]] and not watched.used[-1]


# --- one tensor -------------------------------------------------------------------------------------------------------


def layer_input(fill: float) -> Tensor:
    return torch.full((1, 5, 64), fill, requires_grad=True)


def opened(limit: int = 1 << 20, device: Device = CPU) -> Away:
    away = Away(device)
    away.on, away.host.limit = True, limit
    away.begin()
    return away


def test_a_tensor_leaves_all_its_places_and_returns() -> None:
    away, given, results = opened(), [layer_input(3.0), "mask"], [None, layer_input(1.0)]
    results[0] = given[0]
    seen = weakref.ref(given[0])
    away.send(7, [(given, 0), (results, 0)])
    assert seen() is None and given[0] is results[0] and not isinstance(given[0], Tensor)
    away.release(7)
    away.back(7)
    assert given[0] is results[0] and given[0].is_leaf and given[0].requires_grad
    assert torch.equal(given[0], layer_input(3.0)) and given[1] == "mask" and torch.equal(results[1], layer_input(1.0))


def test_a_tensor_that_somebody_else_holds_stays() -> None:
    away, held = opened(), layer_input(3.0)
    given = [held]
    away.send(0, [(given, 0)])
    assert given[0] is held and not away.host._at
    graph = (held * held).sum()  # of a part of the model between two layers
    del held
    away.send(0, [(given, 0)])
    assert isinstance(given[0], Tensor)
    graph.backward()
    assert given[0].grad is not None


def test_a_tensor_stays_where_host_memory_ends(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    away, given = opened(2 * SMALL), [layer_input(float(at)) for at in range(20)]
    for at in range(20):
        away.send(at, [(given, at)])
    gone = [not isinstance(each, Tensor) for each in given]
    assert 5 <= sum(gone) == gone.index(False) and away.host.bytes == 2 * SMALL
    away.release(20)
    for at in range(20):
        away.back(at)
    assert all(torch.equal(each, layer_input(float(at))) and each.requires_grad for at, each in enumerate(given))

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("cudaHostAlloc failed\nmore")

    host = HostStack(CPU)
    host.limit = 1 << 20
    monkeypatch.setattr(torch, "empty", refuse)
    assert host.take(10) is None and host.limit == 0
    assert "stays on the GPU: cudaHostAlloc failed" in caplog.text and "more\n" not in caplog.text


def test_what_experts_kept_is_theirs_again_unless_the_model_changed_it() -> None:
    outputs, away = KeptOutputs(), opened()
    for link, fill in (("one", 1.0), ("two", 2.0)):
        outputs.keep(*[None] * 3, torch.full((5, 64), fill), link)  # type: ignore[arg-type]
    outputs.linked["two"].out.add_(1)
    memory = StorageWeakRef(outputs.linked["one"].out.untyped_storage())
    away.send_kept(3, outputs)
    away.release(3)
    assert memory.expired() and list(outputs.linked) == ["two"]
    away.back(3)
    kept = outputs.take("one", None)
    assert kept is not None and torch.equal(kept.out, torch.full((5, 64), 1.0))
    assert outputs.take("two", None) is None


class Told(HostStream):
    """A stream that says what it is told to wait for."""

    def __init__(self, name: str, said: list[str]) -> None:
        self.name, self.said = name, said

    def wait_stream(self, stream: Any) -> None:
        self.said.append(f"{self.name} waits for {stream.name}")


def test_streams_wait_for_each_other() -> None:
    """A copy begins when its source is computed and its target is free; memory is given back behind its copy."""
    said: list[str] = []

    class Event(HostEvent):
        def record(self, stream: Any = None) -> None:
            self.name = stream.name
            said.append(f"copied {self.name}")

        def wait(self, stream: Any = None) -> None:
            said.append(f"{stream.name} waits for the copy {self.name}")

    class Gpu(Device):
        layers, names = Told("layers", said), iter(("out", "in"))

        def new_stream(self) -> Any:
            return Told(next(self.names), said)

        def current_stream(self) -> Any:
            return self.layers

        def event(self, **_: Any) -> Any:
            return Event()

    away, given = opened(device=Gpu(torch.device("cpu"))), [layer_input(1.0)]

    def during(act: Callable[[], None]) -> list[str]:
        del said[:]
        act()
        return list(said)

    assert during(lambda: away.send(0, [(given, 0)])) == ["out waits for layers", "copied out"]
    assert during(lambda: away.release(0)) == ["layers waits for the copy out"]
    assert during(lambda: away.fetch(0)) == ["in waits for layers", "copied in"]
    assert during(lambda: away.back(0)) == ["layers waits for the copy in"]
    assert during(away.end) == ["layers waits for out", "layers waits for in"]


def test_bytes_of_deepseek_v3() -> None:
    """8 micro-batches of 2,048 tokens in bf16: 28 GB wait, and half of a GPU of 24 GB is enough without them."""
    tokens, hidden, layers = 8 * 2048, 7168, 61
    assert tokens * host_bytes(hidden, layers, 2) == pytest.approx(28.7e9, rel=0.01)
    assert tokens * (waiting_bytes(hidden, layers, 2, True) - away_bytes(hidden, 2)) == pytest.approx(27.2e9, rel=0.01)
    assert tokens * away_bytes(hidden, 2) < 12e9
