"""The machine that is planned for: this one, or one that is described, with what was assumed of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import torch

from ktft import native, system
from ktft.config import memory_limit, parse_size
from ktft.lanes.calibrate import copy_seconds
from ktft.lanes.simulate import PCIE_RATES

# FLOP/s of products on registers, a core: measured P over cores, docs/benchmarks.md (amx_bf16: 43 TFLOPS on 16;
# avx512_bf16: 0.43 on 2). Without bf16 products: two fp32 multiply-adds of a vector a cycle at 2.5 GHz, published.
CORE_FLOPS = {"amx_bf16": 2.7e12, "avx512_bf16": 0.21e12, "avx512": 0.16e12, "avx2": 0.08e12, "scalar": 0.004e12}
# Bytes/s a socket can read: channels x transfer rate x 8 bytes, as published for the servers that have the ISA, of
# which about 75% is reached: 8 x DDR5-4800, 12 x DDR5-4800, 8 x DDR4-3200, 4 x DDR4-3200.
SOCKET_BANDWIDTH = {
    "amx_bf16": 0.75 * 307e9,
    "avx512_bf16": 0.75 * 461e9,
    "avx512": 0.75 * 205e9,
    "avx2": 0.75 * 205e9,
    "scalar": 0.75 * 102e9,
}
CORES_A_SOCKET = 32
DISK_RATE = 2e9
OPERATING_SYSTEM = 0.02  # of the memory
_STREAMED, _STREAMED_A_THREAD = 1 << 30, 128 << 20  # bytes that are read to see how fast memory is: more than caches


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory that a process may use, dense bf16 FLOP/s and memory bandwidth."""

    name: str
    memory_bytes: int
    flops: float
    bandwidth: float
    pcie_rate: float


# Published dense bf16 TFLOPS, GB/s of memory, and PCIe's generation (8 lanes of the 4th are as fast as 16 of the 3rd),
# by GiB of memory: the card meant when only its memory is given.
GPUS = {
    8: ("RTX 4060", 60, 272, 3),
    12: ("RTX 4070", 117, 504, 4),
    16: ("RTX 4080", 195, 717, 4),
    24: ("RTX 4090", 165, 1008, 4),
    32: ("RTX 5090", 209, 1792, 5),
    40: ("A100 40GB", 312, 1555, 4),
    48: ("L40S", 362, 864, 4),
    80: ("H100", 989, 3350, 5),
    96: ("RTX PRO 6000", 503, 1792, 5),
    141: ("H200", 989, 4800, 5),
    192: ("B200", 2250, 8000, 5),
}
GPU_USABLE = 0.985  # the rest is the driver's


@dataclass(frozen=True)
class Machine:
    """What memory and time depend on.

    Attributes:
        node_bytes: memory that may be used, a NUMA node; ram_bytes: of all of them, limits included.
        threads: CPU threads of the kernels.
        flops: of products on registers, all threads; bandwidth, disk_rate: bytes/s.
        measured: rates were measured here, and the kernels can be timed.
        assumptions: what was not given; warnings: what this machine lacks.
    """

    node_bytes: tuple[int, ...]
    ram_bytes: int
    threads: int
    isa: str
    flops: float
    bandwidth: float
    disk_rate: float
    gpu: Gpu | None
    measured: bool
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """NUMA nodes."""
        return len(self.node_bytes)

    def with_ram(self, ram_bytes: int) -> Machine:
        """The same with so much memory installed."""
        usable = int(ram_bytes * (1 - OPERATING_SYSTEM))
        return replace(self, ram_bytes=usable, node_bytes=(usable // self.nodes,) * self.nodes)


def gpu_of_size(memory_bytes: int, tflops: float | None = None, pcie_rate: float | None = None) -> Gpu:
    """A GPU of so much memory: the fastest published one that has no more."""
    gib = round(memory_bytes / system.GIB)
    name, own_tflops, gbs, generation = GPUS[max((size for size in GPUS if size <= gib), default=min(GPUS))]
    return Gpu(
        f"{gib} GiB ({name} assumed)",
        int(memory_bytes * GPU_USABLE),
        (tflops or own_tflops) * 1e12,
        gbs * 1e9,
        pcie_rate or PCIE_RATES[generation],
    )


@dataclass(frozen=True)
class Description:
    """A machine as options give it; None where they do not.

    Raises:
        ValueError: a size that is none, an ISA or a PCIe generation that nobody knows.
    """

    ram: str | None = None
    gpu: str | None = None
    gpu_tflops: float | None = None
    pcie: str | None = None
    cores: int | None = None
    sockets: int | None = None
    bandwidth: str | None = None
    isa: str | None = None
    disk_rate: str | None = None

    @property
    def given(self) -> bool:
        """Whether another machine than this one is meant."""
        others = (self.ram, self.gpu, self.gpu_tflops, self.pcie, self.cores, self.sockets, self.bandwidth, self.isa)
        return any(option is not None for option in others)

    def size(self, option: str, unit: int = 1024) -> int | None:
        """One option's size in bytes, checked."""
        text = getattr(self, option)
        if text is None:
            return None
        try:
            size = parse_size(text, unit)
        except ValueError as error:
            raise ValueError(f"--{option.replace('_', '-')}: {error}") from None
        if size < 1:
            raise ValueError(f"--{option.replace('_', '-')} is {text!r}; it must be more than 0")
        return size

    def the_gpu(self) -> Gpu | None:
        """The GPU; None without one."""
        if self.gpu in (None, "none", "0"):
            return None
        memory = self.size("gpu")
        assert memory is not None
        return gpu_of_size(memory, self.gpu_tflops, self.pcie_rate())

    def pcie_rate(self) -> float | None:
        """Bytes/s of copies to the GPU and from it; None if they are the GPU's own."""
        if self.pcie is None or not self.pcie.strip().isdecimal():
            return self.size("pcie", 1000)
        generation = int(self.pcie)
        if generation not in PCIE_RATES:
            known = ", ".join(map(str, PCIE_RATES))
            raise ValueError(f"--pcie is {self.pcie!r}; give a generation ({known}) or bytes a second, as 25G")
        return PCIE_RATES[generation]

    def machine(self) -> Machine:
        """The machine described; what is left out is assumed, and told."""
        assumptions = []

        def default(option: str, value: Any, shown: str) -> Any:
            given = getattr(self, option)
            if given is None:
                assumptions.append(f"--{option.replace('_', '-')} {shown}")
            return value if given is None else given

        if self.ram is None:
            raise ValueError("a described machine needs --ram, for instance --ram 512G")
        ram, gpu = self.size("ram"), self.the_gpu()
        assert ram is not None
        sockets = default("sockets", 1, "1")
        cores = default("cores", CORES_A_SOCKET * sockets, f"{CORES_A_SOCKET * sockets}")
        isa = default("isa", "amx_bf16", "amx_bf16")
        if isa not in CORE_FLOPS:
            raise ValueError(f"--isa is {isa!r}; known: {', '.join(CORE_FLOPS)}")
        published = SOCKET_BANDWIDTH[isa] * sockets
        default("bandwidth", published, f"{published / 1e9:.0f}G (75% of the memory channels' published rate)")
        default("disk_rate", DISK_RATE, f"{DISK_RATE / 1e9:.0f}G")
        if self.gpu is None:
            assumptions.append("no --gpu: everything runs on the CPU")
        elif gpu is not None:
            default("gpu_tflops", None, f"{gpu.flops / 1e12:.0f}, of {gpu.name}")
            default("pcie", None, f"{gpu.pcie_rate / 1e9:.3g}G, pinned, of {gpu.name}")
        assumptions.append(f"{OPERATING_SYSTEM:.0%} of the memory is the operating system's")
        machine = Machine(
            node_bytes=(0,) * sockets,
            ram_bytes=0,
            threads=cores,
            isa=isa,
            flops=CORE_FLOPS[isa] * cores,
            bandwidth=self.size("bandwidth", 1000) or published,
            disk_rate=self.size("disk_rate", 1000) or DISK_RATE,
            gpu=gpu,
            measured=False,
            assumptions=tuple(assumptions),
        )
        return machine.with_ram(ram)


def this_machine(threads: int | None, numa_nodes: int | None, *, gpu: bool, disk_rate: float | None) -> Machine:
    """This machine as it is now, with what it can do measured in about a second.

    Args:
        threads, numa_nodes: settings of the recipe.
        gpu: whether a GPU is to be used if there is one.
        disk_rate: as measured from the checkpoint or given; None if neither.
    """
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
    """FLOP/s of products on registers, and bytes/s read from memory, of all threads."""
    flops, _ = native.compute_ceilings(runtime, 0.02)
    size = min(_STREAMED_A_THREAD * runtime.threads, _STREAMED, system.available_memory() // 8)
    memory = native.StreamedMemory(runtime, size)
    memory.read()
    return flops, max(memory.read() for _ in range(2))


def _this_gpu() -> Gpu | None:
    """The GPU that training would take, with its bf16 products timed; None without CUDA."""
    if not torch.cuda.is_available():
        return None
    name, (free, _) = torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        a @ a
    start.record()
    for _ in range(10):
        a @ a
    end.record()
    torch.cuda.synchronize()
    flops = 10 * 2 * 4096**3 / (start.elapsed_time(end) / 1e3)
    buffer = torch.empty(1 << 28, device="cuda", dtype=torch.uint8)
    other = torch.empty_like(buffer)
    start.record()
    other.copy_(buffer)
    end.record()
    torch.cuda.synchronize()
    bandwidth = 2 * buffer.numel() / (start.elapsed_time(end) / 1e3)
    copy = copy_seconds(torch.device("cuda"))
    return Gpu(name, free, flops, bandwidth, buffer.numel() / min(copy(True, buffer.numel()) for _ in range(3)))


def _warnings(available: int) -> list[str]:
    """What would make training slower, or end it, on this machine."""
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
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        found.append(f"{torch.cuda.device_count()} GPUs are visible, ktft trains on one: set CUDA_VISIBLE_DEVICES")
    return found
