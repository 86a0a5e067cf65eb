"""Measures this machine's rates with a model's own layers, in some seconds before training begins."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktft.device import device_of
from ktft.lanes.decide.costs import LayerKind, Rate, Rates
from ktft.lanes.terms import PASSES, Work
from ktft.lora import ExpertLora

BUDGET = 4.0  # seconds that all measurements together should take
_REPEATS = 3
_EXPERTS = 32  # how many of a layer take part: enough for all threads, and more than caches hold
_LONG, _MOST_ROWS = 0.02, 1024  # a pass shows enough once it takes so many seconds, or has so many rows an expert
_COPIES = (1 << 20, 256 << 20)  # bytes


Probe = Callable[[Work, int, int], float]
"""Runs some experts with so many rows each, forward or backward, and returns the seconds that this took. The lane runs
alone, and its work is done when the time ends: a GPU's probe synchronizes.
"""


@dataclass(frozen=True)
class Probes:
    """What is measured."""

    cpu: Probe  # runs the native layer
    gpu: Probe  # decodes and multiplies experts whose packed weights are on the GPU already
    copy: Callable[[bool, int], float]  # seconds to copy so many bytes of pinned memory to the GPU (True) or from it


def calibrate(kind: LayerKind, probes: Probes, budget: float = BUDGET) -> Rates:
    """Measure the rates of a layer of this kind, which the probes run.

    Each probe runs with one row an expert, which shows what reading or decoding an expert takes; with few experts,
    which shows what a call takes; and with more and more rows, until that takes long enough to show what a row takes.
    Once half of `budget` seconds are over, nothing is measured more often than necessary.
    """
    clock = _Clock(budget)
    cpu = {work: _rate(kind, clock, probes.cpu, work, overlapped=True) for work in PASSES}
    gpu = {work: _rate(kind, clock, probes.gpu, work, overlapped=False) for work in PASSES}
    copies = [[clock.least(probes.copy, into, size) for size in _COPIES] for into in (True, False)]
    into, back = ((_COPIES[1] - _COPIES[0]) / max(large - small, 1e-6) for small, large in copies)
    return Rates(cpu, gpu, into, back, max(copies[0][0] - _COPIES[0] / into, 0.0))


class _Clock:
    """Repeats measurements while there is time."""

    def __init__(self, budget: float) -> None:
        self._until = time.perf_counter() + budget / 2

    def least(self, once: Callable[..., float], *args: object) -> float:
        """The least of several measurements, at least two: the first one also makes buffers and compiles kernels."""
        best = min(once(*args) for _ in range(2))
        for _ in range(_REPEATS - 2):
            if time.perf_counter() > self._until:
                break
            best = min(best, once(*args))
        return best


def _rate(kind: LayerKind, clock: _Clock, run: Probe, work: Work, *, overlapped: bool) -> Rate:
    """Measure one processor. `overlapped`: it reads while it multiplies, so an expert takes the longer of the two."""
    many = min(kind.num_experts, _EXPERTS)
    few = max(many // 8, 1)
    one_row, one_row_few = clock.least(run, work, many, 1), clock.least(run, work, few, 1)
    expert = (one_row - one_row_few) / (many - few) if many > few else one_row / many
    expert = max(expert, one_row / many / 4)  # noise must not make an expert free
    call = max(one_row - many * expert, 0.0)
    rows, taken = 16, 0.0
    while True:
        taken = clock.least(run, work, many, rows)
        if (taken >= _LONG and taken > 2 * one_row) or rows >= _MOST_ROWS:
            break  # long enough, and not only the reading of weights
        rows *= 4
    row = (taken - call) / (many * rows) if overlapped else (taken - one_row) / (many * (rows - 1))
    row = max(row, taken / (many * rows) / 4)
    return Rate(flops=kind.row_flops / row, reading=kind.expert_bytes / expert, call=call)


# --- probes of a native layer and of copies ---------------------------------------------------------------------------


def cpu_probe(layer: Any, lora: ExpertLora | None, *, recompute: bool) -> Probe:
    """Probes one of the model's own layers, an `ExpertLayer`. Weights and adapters are read, and nothing is changed.

    With `recompute` backward computes gate and up again, as it does under gradient checkpointing, whose forward keeps
    nothing.
    """
    keep = "recompute" if recompute else "retain"

    def run(work: Work, experts: int, rows: int) -> float:
        x, index, weights = _tokens(layer.hidden_size, layer.num_experts, experts, rows)
        began = time.perf_counter()
        if work == Work.FORWARD:
            layer.forward(x, index, weights, lora, "none" if recompute else keep)
            return time.perf_counter() - began
        _, saved = layer.forward(x, index, weights, lora, keep)
        began = time.perf_counter()
        layer.backward(saved, x, x, index, weights, lora)
        return time.perf_counter() - began

    return run


def gpu_probe(device: torch.device, once: Callable[[Work, int, int], None]) -> Probe:
    """Times work on a device from idle to idle. `once` is given the same as a `Probe`."""
    wait = device_of(device).synchronize

    def run(work: Work, experts: int, rows: int) -> float:
        wait()
        began = time.perf_counter()
        once(work, experts, rows)
        wait()
        return time.perf_counter() - began

    return run


def _tokens(hidden_size: int, num_experts: int, experts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens with one expert each. The experts are far apart in the layer, for neighbours may share a memory page."""
    chosen = torch.arange(experts) * num_experts // experts
    index = chosen.repeat_interleave(rows)[:, None]
    x = torch.full((experts * rows, hidden_size), 1 / math.sqrt(hidden_size), dtype=torch.bfloat16)
    return x, index, torch.ones(index.shape)


def copy_seconds(device: torch.device) -> Callable[[bool, int], float]:
    """Times copies of pinned memory to a device and from it, by events on a stream of their own."""
    size, where = max(_COPIES), device_of(device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=where.pin_memory)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    stream = where.new_stream()

    def run(into: bool, nbytes: int) -> float:
        source, target = (host, there) if into else (there, host)
        with where.stream(stream):
            begin, end = (where.event(timing=True) for _ in range(2))
            begin.record()
            target[:nbytes].copy_(source[:nbytes], non_blocking=True)
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

    return run
