"""The GPU lane's events: with streams whose copies happen as late as these allow, results are the same, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import EXPERTS, TAILS, inputs_for, make_layer, make_lora
from gpu_lane import run_layer
from lanes import no_calibration
from torch import Tensor

from ktft import native
from ktft.checkpoint.families import FAMILIES
from ktft.config import Settings
from ktft.lanes.gpu import lane as lane_module
from ktft.lanes.gpu import residents as resident_module
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.gpu.residents import Residents
from ktft.lanes.gpu.rings import RingPlace
from ktft.lanes.gpu.transfer import Locks, Transfer
from ktft.lanes.lanes import Lanes
from ktft.model.experts import KtftExperts

__all__ = ["no_calibration"]

ISA = native.default_isa()


class LateStream:
    """Does nothing before someone waits for it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.begun = self.done = 0

    def add(self, work: Callable[[], object]) -> int:
        self.queue.append(work)
        self.begun += 1
        return self.begun

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.queue.pop(0)()


class LateEvent:
    """An event that first runs the late stream it was recorded on when something waits for it."""

    def __init__(self) -> None:
        self._of: tuple[LateStream, int] | None = None

    def record(self, stream: Any) -> None:
        self._of = (stream, stream.begun) if isinstance(stream, LateStream) else None

    def wait(self, stream: Any) -> None:
        if self._of is not None and isinstance(stream, LateStream):
            (source, until) = self._of
            stream.add(lambda: source.run(until))
        else:
            self.synchronize()

    def synchronize(self) -> None:
        if self._of is not None:
            self._of[0].run(self._of[1])


class LateTransfer(Transfer):
    """The CPU's copies on such streams. Products are done at once, as if the device were fast."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.into, self.out, self.kept = LateStream(), LateStream(), []
        self.copies = 0

    def event(self) -> LateEvent:
        return LateEvent()

    def copy_in(self, rows: Any, matrices: Any) -> None:
        self.copies += 1
        copy = super().copy_in
        self.into.add(lambda rows=list(rows), matrices=list(matrices): copy(rows, matrices))

    def copy_out(self, rows: Any, matrices: Any) -> None:
        self.copies += 1
        copy = super().copy_out
        self.out.add(lambda rows=list(rows), matrices=list(matrices): copy(rows, matrices))

    def keep(self, tensors: Any, stream: Any) -> None:
        self.kept.extend(tensors)

    def synchronize(self) -> None:
        for stream in (self.into, self.out):
            stream.run(stream.begun)


def outcome(lane: GpuLane, fmt: str, resident: bool, ahead: bool) -> list[Tensor]:
    """Output and gradients of three calls of two layers in turns."""
    layers = [make_layer(64, 288, fmt, ISA, nodes=2), make_layer(64, 160, fmt, ISA)]
    loras = [make_lora(64, layer.intermediate_size, 4, torch.float32) for layer in layers]
    inputs, found = inputs_for(TAILS[1], 64), []
    if resident:
        residents = Residents(lane, 5 * layers[0].packed_bytes // EXPERTS, layers)
        residents.start({layer: [0, 3, 1, 0, 2] for layer in layers})
    for step in range(3):
        for layer, lora in zip(layers, loras, strict=True):
            if ahead:
                lane.prefetch(layer, [0, 1, 2, 3], lora)
            found += run_layer(lane, layer, lora, *inputs)
            for parameter in lora.parameters():  # the optimizer's step: what was copied before must not be used
                parameter.data.mul_(0.5)
        if resident and step == 0:
            for layer in layers:
                residents.observe(layer, [90, 0, 1, 90, 0])
            assert residents.adapt()
    return found


@pytest.mark.parametrize("mirrors", [False, True], ids=["locked", "mirrors"])
@pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
def test_events_alone_order_the_streams(
    ahead: bool, resident: bool, mirrors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mirrors:
        monkeypatch.setattr(Locks, "layer", lambda self, layer: False)
    monkeypatch.setattr(resident_module, "DECAY", 0.0)  # residents change at once
    expected = outcome(GpuLane("cpu", chunk_bytes=60_000), "k4", resident, ahead)
    late = LateTransfer(torch.device("cpu"))
    monkeypatch.setattr(lane_module, "transfer", lambda device: late)
    found = outcome(GpuLane("cpu", chunk_bytes=60_000), "k4", resident, ahead)
    assert late.copies > 50 and late.into.done > 50
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.usefixtures("no_calibration")
@pytest.mark.parametrize("last", [False, True])
def test_adapters_may_change_after_the_last_layer(last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies are done when a forward without gradients returns; the next layer's routing tells of the others'."""
    late = LateTransfer(torch.device("cpu"))
    monkeypatch.setattr(lane_module, "transfer", lambda device: late)
    monkeypatch.setattr(RingPlace, "wait", lambda self, stream: self.views)  # a device that has not got to the products
    lanes = Lanes(Settings(placement="stream"), on_cpu=True)
    layers = [KtftExperts(make_layer(64, 160, "int8", ISA), FAMILIES["qwen3_moe"]).eval() for _ in range(2)]
    for number, layer in enumerate(layers):
        layer.run_in(lanes, number)
    with torch.no_grad():
        layers[last](*inputs_for(TAILS[1], 64), make_lora(64, 160, 4, torch.float32))
    assert late.copies > 0 and (late.into.done > 0) is last


def test_copies_are_late_indeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are not there before `finish`, and products that do not wait take what was in the buffers before."""
    late = LateTransfer(torch.device("cpu"))
    monkeypatch.setattr(lane_module, "transfer", lambda device: late)
    layer, lora = make_layer(64, 160, "int8", ISA), make_lora(64, 160, 4, torch.float32)
    lane, inputs = GpuLane("cpu", chunk_bytes=60_000), inputs_for(TAILS[1], 64)
    expected = run_layer(lane, layer, lora, *inputs)
    with monkeypatch.context() as patch:
        patch.setattr(lane, "finish", lambda: None)
        found = run_layer(lane, layer, lora, *inputs)
        assert not all(torch.equal(a, b) for a, b in zip(found[3:], expected[3:], strict=True))
    with monkeypatch.context() as patch:
        patch.setattr(RingPlace, "wait", lambda self, stream: self.views)
        found = run_layer(lane, layer, lora, *inputs)
    assert not torch.equal(found[0], expected[0])
    late.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(run_layer(lane, layer, lora, *inputs), expected, strict=True))


def test_steps_after_a_checkpoint_are_those_of_a_run_that_resumes_there(no_calibration: None) -> None:
    """What one step sent ahead for the next is multiplied first, and sums then have other last bits."""
    layers = [make_layer(64, 160, "int8", ISA) for _ in range(2)]
    loras = [make_lora(64, 160, 4, torch.float32) for _ in layers]

    def steps(batches: list[int], forget: bool) -> list[Tensor]:
        lanes = Lanes(Settings(placement="stream"), on_cpu=True)
        model = [KtftExperts(layer, FAMILIES["qwen3_moe"]).train() for layer in layers]
        for number, experts in enumerate(model):
            experts.run_in(lanes, number)
        for seed in batches:
            lanes.begin_step()
            generator = torch.Generator().manual_seed(seed)
            # Few tokens, so that each step uses other experts
            x = hidden = torch.randn(2, 64, generator=generator).requires_grad_()
            index = torch.rand(2, EXPERTS, generator=generator).argsort(1)[:, :3]
            for experts, lora in zip(model, loras, strict=True):
                hidden = hidden + experts(hidden, index, torch.rand(2, 3, generator=generator), lora)
            found = [hidden, *torch.autograd.grad(hidden.square().sum(), [x, *loras[0].parameters()])]
            lanes.end_step()
            if forget:
                lanes.forget()
        return found

    pairs = [(first, second) for first in range(4) for second in range(8, 12)]
    resumed = {second: steps([second], forget=True) for _, second in pairs[:4]}
    differ = dict.fromkeys((True, False), 0)
    for first, second in pairs:
        for forget in differ:
            found = steps([first, second], forget)
            differ[forget] += not all(map(torch.equal, found, resumed[second]))
    assert differ[True] == 0 and differ[False] > 0
