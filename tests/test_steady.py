"""Steady passes: all experts of a layer on a GPU, whose routing stays there. The CPU's torch stands in for a GPU."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from adapted import randomize
from contract import dropout_oracle, make_lora
from given import Checkpoint
from host_graphs import record_on_host
from lanes import no_calibration
from test_lanes import HIDDEN, INTERMEDIATE, RANK, ROWS, compare, inputs_for, make_experts
from torch import Tensor
from transformers import Trainer

from ktft import native
from ktft.config import EXPERT_LORA
from ktft.device import Device
from ktft.lanes import passes, routes
from ktft.lanes.decide.placer import Placement
from ktft.lanes.gpu import steady as steady_lane
from ktft.lanes.gpu.call_memory import CallMemory, CutRows, PassReport, call_bytes
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.gpu.residents import STEPS
from ktft.lanes.gpu.steady import SteadyLane
from ktft.lanes.ops import chunk, torch_ops
from ktft.lanes.ops.weights import ChunkMatrix, PackedExperts
from ktft.lanes.routes import Piece
from ktft.lanes.steady_call import Steady, go_back
from ktft.late import settle, write_later
from ktft.lora import ExpertLora
from ktft.model.experts import KtftExperts

__all__ = ["no_calibration"]

pytestmark = pytest.mark.usefixtures("no_calibration")
USED = (17, 3, 9, 64, 9)
"""Rows of experts that are all asked for."""


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steady passes that ran."""
    ran: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(SteadyLane, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            ran.append(name)
            return original(*args, **kwargs)

        return call

    for name in ("forward", "backward"):
        monkeypatch.setattr(SteadyLane, name, counting(name))
    return ran


def checkpointed(experts: KtftExperts) -> Callable[..., Tensor]:
    """The calls that checkpointing makes, whose maker says that they belong together."""
    numbers = itertools.count()

    def deliver() -> None:
        assert experts.laned is not None
        assert experts.laned.lanes.running is not None
        experts.laned.lanes.running.deliver()

    def call(x: Tensor, index: Tensor, weights: Tensor, lora: ExpertLora | None) -> Tensor:
        link = next(numbers)
        x.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(deliver))
        with torch.no_grad():
            first = experts._all_experts(x, index, weights, lora, None, link)
        again = experts._all_experts(x, index, weights, lora, None, link)
        assert torch.equal(first, again)
        return again

    return call


def warm(experts: KtftExperts, rows: tuple[int, ...] = USED) -> None:
    """A step whose passes are decided, as those of each layer's first step."""
    x, index, weights = inputs_for(rows, HIDDEN)
    lora = make_lora(HIDDEN, INTERMEDIATE, RANK, torch.float32)
    checkpointed(experts)(x, index, weights, lora).float().sum().backward()


@pytest.mark.parametrize("fmt", native.FORMATS)
def test_contract(steady: list[str], monkeypatch: pytest.MonkeyPatch, fmt: str) -> None:
    """One of five experts gets no token, and its gradients are zero."""
    monkeypatch.setattr(passes, "_alike", lambda *_: True)  # `compare` has adapters of its own
    experts = make_experts(fmt, nodes=2, placement="stream")
    warm(experts, ROWS)
    compare(experts, checkpointed(experts))
    assert steady == ["forward", "backward"]


def test_lora_travels_ahead_within_a_step(steady: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the next step's first pass, since an optimizer's step comes between, and not while one still writes."""
    experts, lora = make_experts(placement="stream"), make_lora(HIDDEN, INTERMEDIATE, RANK, torch.float32)
    assert experts.laned is not None
    experts.laned.lanes.layers.append(experts.layer)
    seen, original = [], SteadyLane.backward

    def looking(lane: SteadyLane, *args: Any) -> Any:
        seen.append(lane._lane._ahead.has_adapters())
        return original(lane, *args)

    monkeypatch.setattr(SteadyLane, "backward", looking)
    hold, done = threading.Event(), threading.Event()

    def write() -> None:
        assert hold.wait(60)
        done.set()

    for writes in (False, False, True):
        x, index, weights = inputs_for(USED, HIDDEN)
        if writes:
            write_later([(lora.parameters()[:1], write)])
        checkpointed(experts)(x, index, weights, lora).float().sum().backward()
        running = experts.laned.lanes.running
        assert running is not None and not running.gpu._ahead.has_adapters()
    assert seen == [True, False] and not done.is_set()
    hold.set()
    settle()


def test_dropout(steady: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has the masks of its own seed; the first one of its size and dtype is not steady."""
    monkeypatch.setattr(passes, "_alike", lambda *_: True)
    experts = make_experts("k4", nodes=2, placement="stream")
    warm(experts, ROWS)
    for seed in (5, 2**63 + 5, 6):
        compare(experts, checkpointed(experts), torch.float32, oracle=dropout_oracle, dropout=0.3, seed=seed)
    assert steady == ["forward", "backward"] * 2


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_kept_gates(steady: list[str], monkeypatch: pytest.MonkeyPatch, dropout: float) -> None:
    """Gradients are the same, bit for bit, and backward computes no gate and up again. One expert has no rows."""
    monkeypatch.setattr(passes, "_alike", lambda *_: True)
    monkeypatch.setattr(routes, "PIECE_ROWS", 10)
    experts = make_experts("k4", nodes=2, placement="stream")
    warm(experts, ROWS)
    assert experts.laned is not None
    laned = experts.laned
    products, original = list[int](), chunk.grouped

    def counted(x: Tensor, *others: Any) -> Tensor:
        products.append(len(x))
        return original(x, *others)

    monkeypatch.setattr(chunk, "grouped", counted)
    lora = make_lora(HIDDEN, INTERMEDIATE, RANK, torch.float32, dropout=dropout, seed=3)
    found = []
    for keeps in (False, True):
        laned.keeps_gates = keeps
        x, index, weights = inputs_for(ROWS, HIDDEN)
        call = checkpointed(experts)
        del products[:]
        out = call(x, index, weights, lora)
        out.float().square().sum().backward()
        found.append([out, x.grad, weights.grad, *(p.grad for p in lora.parameters()), sum(products)])
        for parameter in lora.parameters():
            parameter.grad = None
    assert steady == ["forward", "backward"] * 2 and laned.gate_bytes == 2 * 2 * 2 * INTERMEDIATE
    again, kept = found
    assert all(torch.equal(*pair) for pair in zip(again[:-1], kept[:-1], strict=True))
    assert (again[-1], kept[-1]) == (5 * index.numel(), 4 * index.numel())


def test_several_pieces(steady: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk with more rows than a piece may have, and pieces without rows."""
    monkeypatch.setattr(passes, "_alike", lambda *_: True)
    monkeypatch.setattr(routes, "PIECE_ROWS", 10)
    experts = make_experts("k4", nodes=2, placement="stream")
    warm(experts, ROWS)
    compare(experts, checkpointed(experts))
    assert steady == ["forward", "backward"]


@pytest.mark.parametrize("resident", [1, 3, 5])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("in_place", [False, True])
def test_residents(
    steady: list[str], monkeypatch: pytest.MonkeyPatch, resident: int, dropout: float, in_place: bool
) -> None:
    """If most of a layer's experts stay on the GPU, its chunks, of 2 and 3 experts, are queued as one, and may be
    multiplied where they are packed.
    """
    monkeypatch.setattr(passes, "_alike", lambda *_: True)
    at_once, packed = list[int](), list[int]()
    original, outputs = GpuLane.at_once, torch_ops.outputs

    def counting(self: GpuLane, layer: Any, chunks: Any, *others: Any) -> Any:
        at_once.append(len(chunks))
        return original(self, layer, chunks, *others)

    def noted(x: Tensor, matrix: ChunkMatrix, experts: PackedExperts, piece: Piece) -> Tensor:
        packed.append(piece.experts)
        return outputs(x, matrix, experts, piece)

    monkeypatch.setattr(GpuLane, "at_once", counting)
    monkeypatch.setattr(torch_ops, "reads_packed", lambda _, rows: in_place and rows < 1e9)
    monkeypatch.setattr(torch_ops, "outputs", noted)
    memory = make_experts("k4").layer.packed_bytes * resident // 5
    experts = make_experts("k4", placement="stream", gpu_expert_memory=memory)
    assert experts.laned is not None
    for _ in range(STEPS):
        warm(experts)
        experts.laned.lanes.end_step()
    oracle: dict[str, Any] = {"oracle": dropout_oracle, "dropout": dropout, "seed": 7} if dropout else {}
    for _ in range(2):  # the first one of its size and dtype is not steady
        del steady[:], at_once[:], packed[:]
        compare(experts, checkpointed(experts), torch.float32, **oracle)
    assert steady == ["forward", "backward"]
    assert at_once == ([2, 2] if resident > 1 else [])
    # Gate and up, and down: of both chunks in forward and backward, where down is not computed again
    assert packed == ([2, 2, 3, 3, 2, 3] if in_place and resident > 1 else [])


@pytest.mark.parametrize("limit", ["EMPTY_PIECES", "SIZES_BYTES", "free"])
def test_too_many_pieces_or_bytes(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(routes, "PIECE_ROWS", 10)
    experts = make_experts(placement="stream")
    layer, lora = experts.layer, make_lora(HIDDEN, INTERMEDIATE, RANK, torch.float32)
    x = torch.zeros(100, HIDDEN)
    for spare, expected in ((-1, False), (0, True)):
        gpu = GpuLane("cpu")
        lane, memory = SteadyLane(gpu), call_bytes(100, 2, HIDDEN, 4)
        if limit == "free":
            monkeypatch.setattr(Device, "free_bytes", lambda _, free=2 * memory + spare: (free, free))
        else:
            empty = steady_lane.empty_pieces(200, gpu.chunk_count(layer, lora), HIDDEN, INTERMEDIATE)
            monkeypatch.setattr(steady_lane, limit, {"EMPTY_PIECES": empty, "SIZES_BYTES": memory}[limit] + spare)
        assert [lane.takes(layer, x, 2, lora) for _ in range(2)] == [False, expected]


def test_what_is_not_steady(steady: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "_alike", lambda *_: True)
    x, index, weights = inputs_for(USED, HIDDEN)
    lora = make_lora(HIDDEN, INTERMEDIATE, RANK, torch.float32)

    def step(experts: KtftExperts, lora: ExpertLora | None = lora) -> None:
        checkpointed(experts)(x, index, weights, lora).float().sum().backward()

    twice = ["forward", "backward"] * 2
    for allowed, hidden, expected in ((0, 0, []), (passes.IDLE, 0, twice[:2]), (0, 1, twice)):
        monkeypatch.setattr(passes, "IDLE", allowed)
        monkeypatch.setattr(Placement, "copies_hidden", hidden)
        idle = make_experts(placement="stream")
        for _ in range(2):
            warm(idle, (17, 3, 0, 64, 9))  # the copy of one would be to no avail
        assert steady == expected
    del steady[:]
    step(make_experts(placement="stream"))  # nothing was decided before
    on_cpu = make_experts(placement="cpu")
    warm(on_cpu)
    step(on_cpu)
    assert not steady
    monkeypatch.setattr(passes, "DECIDED_AGAIN", 2)
    now_and_then = make_experts(placement="stream")
    for _ in range(5):
        step(now_and_then)
    assert steady == twice


def test_what_a_pass_tells() -> None:
    """Sums of large numbers overflow, but that is no bad value; other routings of the same counts differ."""
    hidden, index = torch.full((4, HIDDEN), 3e38), torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2]])
    told = []
    for bad, routing in ((None, index), (2, index.flip(1)), (0, index)):
        if bad is not None:
            hidden[bad, 7] = -torch.inf
        memory = CallMemory(hidden, 2, 4)
        memory.hidden.copy_(hidden)
        memory.index.copy_(routing)
        memory.begin(CutRows((2, 2), 16))
        told.append(PassReport.of(memory.told.tolist()))
    assert [(each.counts, each.stray, each.bad_token) for each in told] == [
        ([3, 2, 3, 0], 0, bad) for bad in (-1, 2, 0)
    ]
    assert told[0].routing == told[2].routing != told[1].routing


@pytest.mark.parametrize("bad", ["hidden", "low", "high"])
def test_bad_values_are_found_when_the_step_is_over(
    steady: list[str], monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    monkeypatch.setattr(passes, "_alike", lambda *_: True)
    experts = make_experts(placement="stream")
    warm(experts)
    x, index, weights = inputs_for(USED, HIDDEN)
    with torch.no_grad():
        if bad == "hidden":
            x[3:, 1] = torch.nan
        else:
            index[0, 0] = -1 if bad == "low" else len(USED)
    link = object()
    with torch.no_grad():
        experts._all_experts(x, index, weights, None, None, link)
    experts._all_experts(x, index, weights, None, None, link).float().sum().backward()
    assert steady == ["forward", "backward"]
    assert experts.laned is not None and experts.laned.lanes.running is not None
    stray = "routed to expert {}, but".format
    message = {"hidden": "hold NaN or Inf \\(token 3 of", "low": stray(-1), "high": stray(len(USED))}[bad]
    with pytest.raises(ValueError, match=message):
        experts.laned.lanes.running.deliver()
    experts.laned.lanes.running.deliver()  # which has nothing more to look at


@pytest.mark.parametrize("form", EXPERT_LORA)
def test_training(
    tiny_checkpoint: Checkpoint, tmp_path: Path, steady: list[str], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """The losses, the weights and the counted tokens are those of passes that wait for the host."""
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    record_on_host(monkeypatch.setattr)
    monkeypatch.setattr("ktft.lanes.gpu.graphs.Recorded.run", lambda self, key, work: work())
    path = tiny_checkpoint("qwen3moe")

    def train(name: str, **kt_config: Any) -> tuple[list[float], dict[str, Tensor], Any]:
        settings = {"placement": "stream", "expert_format": "int8", "expert_lora": form} | kt_config
        model = randomize(runs.adapted(path, settings=settings), std=0.05)
        torch.manual_seed(1)
        data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 100, (6, 64))]
        own = {"max_steps": 6, "per_device_train_batch_size": 1, "save_strategy": "no"}
        own |= {"gradient_checkpointing": True, "learning_rate": 1e-3}
        trainer = Trainer(model, runs.arguments(tmp_path / name, **own), train_dataset=data)
        trainer.train()
        weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        report = json.loads((tmp_path / name / "ktft_report.json").read_text())
        return runs.losses(trainer), weights, report["expert_tokens"]

    usual = train("usual", cuda_graphs=False)
    assert not steady
    found = train("steady")
    assert steady.count("forward") == steady.count("backward") > 0
    assert found[0] == pytest.approx(usual[0], rel=1e-3)
    ours, theirs = (torch.tensor(each[2]["tokens"]) for each in (found, usual))
    assert ours.sum() == theirs.sum()
    assert (ours - theirs).abs().sum() < 0.01 * ours.sum()  # rounding may tip a token's routing


def test_calls_that_differ_are_noticed(steady: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Then outputs are found by their inputs again, as they are where nobody knows which calls belong together."""
    monkeypatch.setattr(passes, "_alike", lambda *_: True)
    experts = make_experts(placement="stream")
    warm(experts)
    x, index, weights = inputs_for(USED, HIDDEN)
    lora = make_lora(HIDDEN, INTERMEDIATE, RANK, torch.float32)
    assert experts.laned is not None
    lanes = experts.laned.lanes.running
    assert lanes is not None
    for other in (False, True):
        link, again = object(), index.clone()
        with torch.no_grad():
            experts._all_experts(x, index, weights, lora, None, link)
        if other:
            again[0] = again[0].flip(0)
        experts._all_experts(x, again, weights, lora, None, link).float().sum().backward()
        lanes.deliver()
        assert lanes.links is not other
    del steady[:]
    checkpointed(experts)(x, index, weights, lora).float().sum().backward()
    assert not steady


def test_sizes_that_come_once_are_not_steady(steady: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each size needs memory of its own, so no more than a few get it."""
    monkeypatch.setattr(passes, "_alike", lambda *_: True)
    monkeypatch.setattr("ktft.lanes.gpu.steady.SIZES", 1)
    experts = make_experts(placement="stream")
    sizes = [USED, (18, 4, 10, 64, 10), (19, 5, 11, 64, 11)]
    for rows in sizes:
        warm(experts, rows)
    assert not steady
    warm(experts, sizes[1])
    assert steady == ["forward", "backward"]
    warm(experts, sizes[2])
    warm(experts, sizes[1])
    assert steady == ["forward", "backward"] * 2


class Answered:
    """What `Steady` needs of a call; its gradients are its inputs, so that it shows whom they reached."""

    owes = True

    def __init__(self, out: Tensor) -> None:
        self.out = out

    def backward(self, grad: Tensor, hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor | None, ...]:
        return grad * hidden.detach(), weights.detach()


@pytest.mark.parametrize("changed", [None, "hidden", "weights", "out"])
def test_what_lies_around_a_call_takes_autograds_engine(changed: str | None) -> None:
    """Otherwise its gradient would be lost."""
    hidden, weights = (torch.rand(3, size, requires_grad=True) for size in (4, 2))
    given = {name: each * 2 if name == changed else each for name, each in (("hidden", hidden), ("weights", weights))}
    index = torch.zeros(3, 2, dtype=torch.int64)
    out = Steady.apply(Answered(torch.zeros(3, 4)), given["hidden"], index, given["weights"])
    out = out * 2 if changed == "out" else out
    assert go_back(out, torch.ones(3, 4)) == (changed is None)
    if changed is not None:
        assert hidden.grad is None and weights.grad is None
        out.backward(torch.ones(3, 4))
    assert hidden.grad is not None and weights.grad is not None
    assert torch.equal(hidden.grad, hidden.detach() * {None: 1, "weights": 1, "hidden": 4, "out": 2}[changed])
    assert torch.equal(weights.grad, weights.detach() * (4 if changed == "weights" else 1))
