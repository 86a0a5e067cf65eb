"""Calibration finds known rates again from simulated passes, and measures a native layer's own passes."""

from __future__ import annotations

import pytest
import torch
from contract import EXPERTS, make_layer

from ktft.lanes.decide import calibrate as module
from ktft.lanes.decide.calibrate import Probes, calibrate, copy_seconds, cpu_probe, gpu_probe
from ktft.lanes.decide.costs import LayerKind, Rate, Rates
from ktft.lanes.decide.placer import Placer
from ktft.lanes.terms import PASSES
from ktft.lora import ExpertLora, LoraPair

KIND = LayerKind(256, 8, 7168, 2048, 44_000_000, 3 * 8 * 9216)
TRUE = Rates(
    cpu={"forward": Rate(12e12, 75e9, 2e-4), "backward": Rate(7e12, 45e9, 3e-4)},
    gpu={"forward": Rate(400e12, 500e9, 3e-4), "backward": Rate(200e12, 400e9, 6e-4)},
    copy_in=54e9,
    copy_out=50e9,
    copy_call=5e-5,
)


class Machine:
    """Simulated passes that return the time they would take."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def told(self, seconds: float) -> float:
        self.seconds, self.calls = self.seconds + seconds, self.calls + 1
        return seconds

    def cpu(self, work: str, experts: int, rows: int) -> float:
        rate = TRUE.cpu[work]
        reading, products = KIND.expert_bytes / rate.reading, rows * KIND.row_flops / rate.flops
        return self.told(rate.call + experts * max(reading, products))

    def gpu(self, work: str, experts: int, rows: int) -> float:
        rate = TRUE.gpu[work]
        reading, products = KIND.expert_bytes / rate.reading, rows * KIND.row_flops / rate.flops
        return self.told(rate.call + experts * (reading + products))

    def copy(self, into: bool, nbytes: int) -> float:
        return self.told(TRUE.copy_call + nbytes / (TRUE.copy_in if into else TRUE.copy_out))

    def probes(self) -> Probes:
        return Probes(self.cpu, self.gpu, self.copy)


def test_rates_are_found_again() -> None:
    machine = Machine()
    found = calibrate(KIND, machine.probes())
    for true, own in ((TRUE.cpu, found.cpu), (TRUE.gpu, found.gpu)):
        for work in PASSES:
            assert own[work].flops == pytest.approx(true[work].flops, rel=0.03)
            assert own[work].reading == pytest.approx(true[work].reading, rel=0.03)
            assert own[work].call == pytest.approx(true[work].call, rel=0.05)
    assert (found.copy_in, found.copy_out) == pytest.approx((54e9, 50e9))
    assert found.copy_call == pytest.approx(5e-5)
    assert machine.seconds < 5  # at DeepSeek-V3's size
    line = str(found)
    assert "\n" not in line
    assert "CPU 12 and 7 TFLOPS" in line and "75 GB/s; PCIe 54 GB/s; GPU 400 and 200 TFLOPS" in line


def test_noise_cannot_make_a_rate_free_or_negative() -> None:
    calls = iter(range(10**6))
    found = calibrate(KIND, Probes(*[lambda *_: 0.03 if next(calls) % 7 else 0.001] * 2, lambda *_: 1e-3))
    for rate in (*found.cpu.values(), *found.gpu.values()):
        assert rate.flops > 0 and rate.reading > 0 and rate.call >= 0
    assert Placer(KIND, found).decide([8] * 256, (), "forward").seconds["cpu"] >= 0


def test_after_half_of_the_budget_measurements_are_not_repeated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    quick, slow = Machine(), Machine()
    calibrate(KIND, quick.probes())
    clock = iter(range(10**6))
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    calibrate(KIND, slow.probes(), budget=2.0)
    assert slow.calls < 0.75 * quick.calls


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layers_own_passes(recompute: bool) -> None:
    hidden, inner = 64, 32
    layer = make_layer(hidden, inner, "int8")
    a, b = torch.randn(EXPERTS, 4, hidden), torch.randn(EXPERTS, inner, 4)
    lora = ExpertLora({"up_proj": LoraPair(a.clone(), b.clone(), 2.0)})
    run = cpu_probe(layer, lora, recompute=recompute)
    kind = LayerKind.of(layer, 2, lora)
    assert kind == LayerKind(EXPERTS, 2, hidden, inner, layer.packed_bytes // EXPERTS, 4 * (hidden + inner))
    device = torch.device("cpu")
    ran: list[tuple[str, int, int]] = []
    on_device = gpu_probe(device, lambda *what: ran.append(what))
    rates = calibrate(kind, Probes(run, on_device, copy_seconds(device)), budget=0.5)
    assert {work for work, *_ in ran} == set(PASSES)
    assert {experts for _, experts, _ in ran} == {EXPERTS, 1}
    assert all(rate.flops > 0 for rate in rates.cpu.values())
    assert torch.equal(lora.pairs["up_proj"].a, a) and torch.equal(lora.pairs["up_proj"].b, b)
    placed = Placer(kind, rates).decide([3] * EXPERTS, (), "backward")
    assert len(placed.cpu) + len(placed.stream) + len(placed.resident) == EXPERTS
