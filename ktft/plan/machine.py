"""Describes this machine, with its rates measured."""

from __future__ import annotations

import os

import torch

from ktft import native, system
from ktft.config import memory_limit
from ktft.device import accelerator
from ktft.lanes.decide.calibrate import copy_seconds
from ktft.plan.description import DISK_RATE, Gpu, Machine

_STREAMED, _STREAMED_A_THREAD = 1 << 30, 128 << 20  # bytes read to time memory, more than fit in caches


def this_machine(threads: int | None, numa_nodes: int | None, *, gpu: bool, disk_rate: float | None) -> Machine:
    """Describe this machine as it is now; measuring its rates takes about a second.

    Args:
        threads, numa_nodes: the recipe's settings.
        gpu: whether to use a GPU if there is one.
        disk_rate: bytes/s, measured on the checkpoint or given by the user; None if neither is known.
    """
    native.check_machine(threads, numa_nodes)
    runtime = native.runtime(threads, numa_nodes)
    flops, bandwidth = _measure(runtime)
    available = system.available_memory()
    real = native.topology()["nodes"]
    free = [real[n % len(real)]["memory_bytes"] for n in range(runtime.nodes)]
    return Machine(
        node_bytes=tuple(min(size, available) for size in free),
        ram_bytes=available,
        threads=runtime.threads,
        isa=runtime.isa,
        flops=flops,
        bandwidth=bandwidth,
        disk_rate=disk_rate or DISK_RATE,
        gpu=_this_gpu() if gpu else None,
        measured=True,
        assumptions=() if disk_rate else (f"--disk-rate {DISK_RATE / 1e9:.0f}G: no shard here to measure it on",),
        warnings=(*runtime.warnings, *_warnings(available)),
    )


def _measure(runtime: native.Runtime) -> tuple[float, float]:
    """Measure the FLOP/s of products on registers and the bytes/s read from memory, for all threads together."""
    flops, _ = native.compute_ceilings(runtime, 0.02)
    size = min(_STREAMED_A_THREAD * runtime.threads, _STREAMED, system.available_memory() // 8)
    memory = native.StreamedMemory(runtime, size)
    memory.read()
    return flops, max(memory.read() for _ in range(2))


def _this_gpu() -> Gpu | None:
    """The GPU that training would use, with its bf16 products and copies timed; None if there is no GPU."""
    gpu = accelerator()
    if gpu is None:
        return None
    free, _ = gpu.free_bytes() or (0, 0)
    generator = torch.Generator(gpu.device).manual_seed(0)
    a = torch.randn(4096, 4096, device=gpu.device, dtype=torch.bfloat16, generator=generator)
    start, end = (gpu.event(timing=True) for _ in range(2))
    for _ in range(3):
        a @ a
    start.record()
    for _ in range(10):
        a @ a
    end.record()
    gpu.synchronize()
    flops = 10 * 2 * 4096**3 / (start.elapsed_time(end) / 1e3)
    buffer = torch.empty(1 << 28, device=gpu.device, dtype=torch.uint8)
    other = torch.empty_like(buffer)
    start.record()
    other.copy_(buffer)
    end.record()
    gpu.synchronize()
    bandwidth = 2 * buffer.numel() / (start.elapsed_time(end) / 1e3)
    copy = copy_seconds(gpu.device)
    return Gpu(gpu.name(), free, flops, bandwidth, buffer.numel() / min(copy(True, buffer.numel()) for _ in range(3)))


def _warnings(available: int) -> list[str]:
    """Warnings about conditions on this machine that would slow training down or end it."""
    found = []
    limit, total = system.cgroup_memory_limit(), system.memory().get("MemTotal", 0)
    if limit is not None and limit < total:
        found.append(
            f"a cgroup allows {system.readable(limit)} of this machine's {system.readable(total)}: raise it with "
            "docker run --memory, or your scheduler's memory request"
        )
    if memory_limit() is not None:
        found.append(f"KTFT_MEMORY_LIMIT leaves {system.readable(available)}")
    pages = system.transparent_hugepages()
    if pages not in ("always", "madvise"):
        found.append(
            f"transparent huge pages are {pages or 'not offered by this kernel'}, which slows the experts down: "
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        )
    quota = native.topology()["cgroup_cpus"]
    if quota is not None and quota < (os.cpu_count() or 1):
        found.append(f"a cgroup allows {quota:g} of {os.cpu_count()} CPUs")
    return found
