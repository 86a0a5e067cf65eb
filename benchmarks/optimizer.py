"""Times one optimizer step over expert LoRA beside memory bandwidth and other AdamWs: `ktft bench optimizer`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from benchmarks import machine
from benchmarks.cases import Shape
from benchmarks.measure import SETTLE_SECONDS
from benchmarks.report import new_table, short
from ktft import native, system
from ktft.config import PROJECTIONS
from ktft.train.optimizer import AdamW

# A step reads parameter, gradient and both moments and writes all but the gradient, all in fp32.
BYTES = 7 * 4
HELD_BYTES = 4 * 4
WARM_STEPS = 2


@dataclass(frozen=True)
class Record:
    """Medians of one optimizer's step, as printed; docs/reference/measuring.md, "The optimizer", says what each is."""

    optimizer: str
    shape: str
    rank: int
    layers: int
    tensors: int
    parameters: int
    cpu: str
    isa: str
    threads: int
    nodes: int
    runs: int
    ms: float
    gbs: float
    read_gbs: float
    mix_gbs: float
    percent_of_read: float
    percent_of_mix: float
    ratio: float


def _deepspeed(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    return DeepSpeedCPUAdam(params, lr=1e-4, weight_decay=0.01, adamw_mode=True)


Make = Callable[[list[torch.nn.Parameter], native.Runtime], Any]
OPTIMIZERS: dict[str, Make] = {
    "ktft": lambda params, runtime: AdamW(params, lr=1e-4, runtime=runtime),
    "torch-fused": lambda params, _: torch.optim.AdamW(params, lr=1e-4, fused=True),
    "torch-foreach": lambda params, _: torch.optim.AdamW(params, lr=1e-4, foreach=True),
    "torch": lambda params, _: torch.optim.AdamW(params, lr=1e-4, foreach=False),
    "deepspeed": lambda params, _: _deepspeed(params),
}
"""Name -> function that makes the optimizer. All others are compared with the first."""


def layer_parameters(shape: Shape, rank: int) -> int:
    """LoRA parameters of one layer: 3 r (H + I) E."""
    return sum(sum(shape.dims(projection)) for projection in PROJECTIONS) * rank * shape.num_experts


def _make_parameters(shape: Shape, rank: int, layers: int) -> list[torch.nn.Parameter]:
    """LoRA A and B of every projection and layer, with gradients, as training has them."""
    made = []
    for _ in range(layers):
        for projection in PROJECTIONS:
            out_features, in_features = shape.dims(projection)
            for dims in ((shape.num_experts, rank, in_features), (shape.num_experts, out_features, rank)):
                parameter = torch.nn.Parameter(torch.empty(dims).uniform_(-1e-2, 1e-2))
                parameter.grad = torch.empty(dims).uniform_(-1e-4, 1e-4)
                made.append(parameter)
    return made


def run(
    shape: Shape,
    rank: int,
    parameters: int,
    threads: int | None,
    runs: int,
    wanted: list[str],
    say: Callable[[str], None],
) -> Iterator[Record | str]:
    """Yield records as they are measured, or why an optimizer is left out. `say` gets the name of each step.

    Raises:
        ValueError: the tensors do not fit in free memory.
    """
    torch.manual_seed(0)
    runtime = native.runtime(threads)
    torch.set_num_threads(runtime.threads)
    layers = max(1, -(-parameters // layer_parameters(shape, rank)))
    count = layers * layer_parameters(shape, rank)
    if count * HELD_BYTES > 0.8 * machine.free_bytes():
        raise ValueError(
            f"{count:,} parameters with gradients and moments take {count * HELD_BYTES / 2**30:.1f} GiB, and "
            f"{machine.free_bytes() / 2**30:.1f} GiB are free; give fewer --parameters"
        )
    say("bandwidth ...")
    memory = native.StreamedMemory(runtime, machine.read_bytes())
    say(f"{count:,} parameters ...")
    params = _make_parameters(shape, rank, layers)
    ours = 0.0
    for name in wanted:
        say(f"{name} ...")
        try:
            optimizer = OPTIMIZERS[name](params, runtime)
        except Exception as error:  # a library that is absent, or does not build here
            yield f"{name}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            continue
        timed = [_once(optimizer, memory) for _ in range(WARM_STEPS + runs)][WARM_STEPS:]
        del optimizer
        seconds = statistics.median(step for step, _, _ in timed)
        ours = ours or seconds
        yield Record(
            optimizer=name,
            shape=shape.name,
            rank=rank,
            layers=layers,
            tensors=len(params),
            parameters=count,
            cpu=system.cpu_name(),
            isa=runtime.isa,
            threads=runtime.threads,
            nodes=runtime.nodes,
            runs=runs,
            ms=seconds * 1e3,
            gbs=count * BYTES / seconds / 1e9,
            read_gbs=statistics.median(read for _, read, _ in timed) / 1e9,
            mix_gbs=statistics.median(mix for _, _, mix in timed) / 1e9,
            percent_of_read=100 * statistics.median(count * BYTES / step / read for step, read, _ in timed),
            percent_of_mix=100 * statistics.median(count * BYTES / step / mix for step, _, mix in timed),
            ratio=seconds / ours,
        )


def _once(optimizer: torch.optim.Optimizer, memory: native.StreamedMemory) -> tuple[float, float, float]:
    """Seconds of a step, and bytes per second of reading and of the mix, measured just before it."""
    time.sleep(SETTLE_SECONDS)
    read, mix = memory.read(), memory.update()
    start = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - start, read, mix


def make_table(records: list[Record]) -> Table:
    """A table with one row per optimizer."""
    table = new_table("optimizer", (), ("ms", "GB/s", "read GB/s", "%read", "mix GB/s", "%mix", "x ktft"))
    for r in records:
        figures = (r.ms, r.gbs, r.read_gbs, r.percent_of_read, r.mix_gbs, r.percent_of_mix)
        table.add_row(r.optimizer, *(short(value) for value in figures), f"{r.ratio:.2f}")
    return table


def explain(records: list[Record]) -> Iterator[str]:
    """The machine and what was updated, in one line."""
    first = records[0]
    yield (
        f"{first.cpu}, {first.isa}, {first.threads} threads, {first.nodes} NUMA nodes: {first.parameters:,} fp32 "
        f"parameters, LoRA of rank {first.rank} on {first.layers} layers of {first.shape}, {first.tensors} tensors"
    )
