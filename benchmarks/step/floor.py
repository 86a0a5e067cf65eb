"""The least time that a step could take on the machine as measured: docs/reference/measuring.md defines it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from benchmarks.step.cases import Job, Rates
from benchmarks.step.runners import clock, device_here
from ktft import native

COPY_BYTES = 256 << 20
PRODUCT = 4096  # rows and columns of the GPU's product
ON_CPU = (1 << 24, 512)  # both sizes without a GPU, where only the floor's arithmetic matters
REPEATS = 3
PASSES = 2


def _best(run_once: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few runs."""
    times = []
    for _ in range(REPEATS + 1):
        began = clock(device)
        run_once()
        times.append(clock(device) - began)
    return min(times[1:])


@functools.cache
def _memory(threads: int | None, nbytes: int) -> native.StreamedMemory:
    return native.StreamedMemory(native.runtime(threads), nbytes)


def measure_rates(threads: int | None, read_bytes: int) -> Rates:
    """Measure the machine's rates. It takes some tenths of a second, and keeps `read_bytes` of memory to read."""
    device = device_here()
    nbytes, size = (COPY_BYTES, PRODUCT) if device.type == "cuda" else ON_CPU
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda").fill_(1)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    pcie = nbytes / _best(lambda: target.copy_(source, non_blocking=True), device)
    gpu = 2 * size**3 / _best(lambda: a @ a, device)
    time.sleep(0.05)  # torch's threads spin
    registers, _ = native.compute_ceilings(native.runtime(threads))
    return Rates(registers, gpu, _memory(threads, read_bytes).read(), pcie)


def expert_bytes(job: Job) -> int:
    """Packed bytes of one expert."""
    shape = job.shape
    sizes = (shape.num_experts, shape.hidden_size, shape.intermediate_size)
    return sum(native.packed_bytes(*sizes, job.format, 1)) // shape.num_experts


def pass_floor(
    counts: list[int], expert: int, token_flops: float, rates: Rates, placement: str, resident: int
) -> float:
    """Seconds of one pass through one layer's experts, at the best split between lanes that run beside each other.

    Args:
        counts: the tokens of each expert.
        expert: the packed bytes of one expert.
        token_flops: FLOPs of one token in one expert.
        rates: the machine's rates.
        placement: `cpu`, `stream`, `resident` or `auto`, which decides the lanes in use.
        resident: the number of experts on the GPU, those with most tokens.
    """
    used = sorted((count for count in counts if count), reverse=True)
    held = len(used) if placement == "resident" else min(resident, len(used))
    best = float("inf")
    # A lane's bytes depend only on its number of experts, so the GPU takes those with most tokens.
    for split in range(held, len(used) + 1):
        here = used[split:]
        cpu = max(len(here) * expert / rates.read, sum(here) * token_flops / rates.registers)
        stream, gpu = (split - held) * expert / rates.pcie, sum(used[:split]) * token_flops / rates.gpu
        if (here and placement in ("stream", "resident")) or (split > held and placement == "cpu"):
            continue
        best = min(best, max(cpu, stream, gpu))
    return best


def experts_floor(job: Job, counts: list[list[int]], rates: Rates) -> float:
    """Seconds of all layers' experts, forward and backward once each. `counts`: tokens an expert, layer by layer."""
    size, shape = expert_bytes(job), job.shape
    memory = job.settings().gpu_expert_memory
    each = shape.num_experts if memory == "auto" else int(memory) // (size * job.layers)
    flops = 6.0 * shape.hidden_size * shape.intermediate_size
    return sum(PASSES * pass_floor(layer, size, flops, rates, job.placement, each) for layer in counts)
