"""A machine: its sizes and rates, and one that options describe, with what was assumed of it. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ktft import system
from ktft.config import Settings
from ktft.sizes import parse_size

# FLOP/s of products on registers, a core: measured P over cores, docs/dev/kernel-log.md (amx_bf16: 43 TFLOPS on 16;
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
LINK_RATE = 40e9
"""Bytes a second that a rank gets from others of its machine without NVLink, over PCIe 5; with it, it is ten times as
much, and nothing of a step either way."""
NETWORK_RATE = 12.5e9  # 100 Gbit/s
OPERATING_SYSTEM = 0.02  # of the memory
# Bytes/s of pinned copies over 16 lanes by PCIe generation: 54 measured of generation 5's 63 GB/s, the same share of
# the others' published rates.
PCIE_RATES = {3: 13.5e9, 4: 27e9, 5: 54e9}


@dataclass(frozen=True)
class Together:
    """Processes that share the experts: how many in all, and how many on each machine, one for each of its GPUs."""

    ranks: int = 1
    local_ranks: int = 1

    @property
    def machines(self) -> int:
        return self.ranks // self.local_ranks


ALONE = Together()


@dataclass(frozen=True)
class Gpu:
    """One GPU: memory that a process may use, dense bf16 FLOP/s and memory bandwidth."""

    name: str
    memory_bytes: int
    flops: float
    bandwidth: float
    pcie_rate: float

    def capped(self, settings: Settings) -> Gpu:
        """The same GPU with as much memory as `gpu_memory` of the settings lets a process use."""
        size = settings.capped(self.memory_bytes)
        if size == self.memory_bytes:
            return self
        return replace(self, memory_bytes=size, name=f"{self.name}, of which gpu_memory allows {system.readable(size)}")


# Published dense bf16 TFLOPS, summed in fp32, GB/s of memory, and PCIe's generation (8 lanes of the 4th are as fast as
# 16 of the 3rd), by GiB of memory: the card meant when only its memory is given.
GPUS = {
    8: ("RTX 4060", 30, 272, 3),
    12: ("RTX 4070", 58, 504, 4),
    16: ("RTX 4080", 97, 717, 4),
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
        local_ranks: how many processes share the machine, if this is what one of them has.
        network_rate: bytes/s that the whole machine receives from others.
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
    local_ranks: int = 1
    network_rate: float = NETWORK_RATE
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """NUMA nodes."""
        return len(self.node_bytes)

    def of_rank(self, local_ranks: int) -> Machine:
        """What each of this many processes has of the machine. Each has a GPU of its own."""
        return replace(
            self,
            ram_bytes=self.ram_bytes // local_ranks,
            node_bytes=tuple(size // local_ranks for size in self.node_bytes),
            threads=max(self.threads // local_ranks, 1),
            flops=self.flops / local_ranks,
            bandwidth=self.bandwidth / local_ranks,
            local_ranks=local_ranks,
        )

    def with_ram(self, ram_bytes: int) -> Machine:
        """The same machine with `ram_bytes` of memory installed."""
        usable = int(ram_bytes * (1 - OPERATING_SYSTEM))
        return replace(self, ram_bytes=usable, node_bytes=(usable // self.nodes,) * self.nodes)


def gpu_of_size(memory_bytes: int, tflops: float | None = None, pcie_rate: float | None = None) -> Gpu:
    """A GPU with this much memory, with the rates of the largest published one that has no more."""
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
    network: str | None = None

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
