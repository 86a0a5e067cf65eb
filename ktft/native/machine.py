"""The CPUs, memory and kernels of this machine, and the threads that compute on it."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ktft import config
from ktft.config import PROJECTIONS, Settings
from ktft.native.extension import core


def cpu_features() -> dict[str, bool]:
    """The name of a CPU feature -> whether this process can use it. For AMX the operating system must grant it too."""
    return dict(core.cpu_features())


def isas() -> list[str]:
    """The ISAs that this CPU runs, slowest first. `runtime` takes the last one unless KTFT_ISA names another."""
    return list(core.isas())


def default_isa() -> str:
    """The ISA that `runtime` takes. It raises ValueError if the one in KTFT_ISA is unknown or cannot run here."""
    return str(core.default_isa())


def topology() -> dict[str, Any]:
    """The CPUs and the memory that this process may use.

    Returns:
        `nodes` (each has `id`, `cpus`, physical `cores`, `memory_bytes`, `free_bytes`), `cgroup_cpus` (the CPU quota or
        None), `cores` (physical cores within the quota) and `mbind` ("ok", or why memory cannot be placed on a node).
    """
    return dict(core.topology())


def packed_bytes(
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    format: str,
    nodes: int,
    biases: bool = False,
    gated: bool = True,
) -> list[int]:
    """Bytes of one layer's experts on each NUMA node. There are fewer entries if there are too few columns for all.

    Raises:
        ValueError: the kernels cannot take the dimensions, or the format is unknown.
    """
    return list(core.packed_bytes(num_experts, hidden_size, intermediate_size, gated, format, biases, nodes))


class LayerMemory(NamedTuple):
    """Bytes of the workspace that all layers of a runtime share, and bytes that one layer retains for its backward."""

    workspace: int
    retained: int


def layer_memory(
    hidden_size: int,
    intermediate_size: int,
    *,
    ranks: Mapping[str, int],
    rows: int,
    experts: float,
    threads: int,
    nodes: int,
    activation: str,
    biases: bool = False,
    gated: bool = True,
) -> LayerMemory:
    """The memory that a layer's calls will take, computed by the code that allocates it.

    Args:
        ranks: LoRA ranks by projection; 0 or absent for a projection without LoRA.
        rows: the number of (token, expert) pairs in one call.
        experts: the expected number of experts that these pairs reach.
        threads, nodes: the runtime's threads and NUMA nodes.
        activation: `retain`, `recompute`, or `none` for a forward without a backward.
    """
    by_projection = [ranks.get(name, 0) for name in PROJECTIONS]
    keep = getattr(core.Keep, activation)
    shape = hidden_size, intermediate_size, gated, biases
    return LayerMemory(*core.layer_memory(*shape, by_projection, rows, experts, threads, nodes, keep))


def kernels() -> list[dict[str, Any]]:
    """The rows of the kernel table, each with `name`, `isa`, `format` and `backward`."""
    return list(core.kernels())


@dataclass(frozen=True)
class Runtime:
    """The thread pools and the workspace that all layers of a process with the same settings share."""

    handle: Any

    @property
    def isa(self) -> str:
        """The name of the ISA whose kernels run."""
        return str(self.handle.isa)

    @property
    def threads(self) -> int:
        """The number of threads that compute, including the calling thread."""
        return int(self.handle.threads)

    @property
    def nodes(self) -> int:
        """The number of NUMA nodes over which the experts are spread."""
        return int(self.handle.nodes)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace, which has grown to the needs of the largest call so far."""
        return int(self.handle.workspace_bytes)

    def take_phases(self) -> dict[str, float]:
        """Seconds that layer calls spent in each phase since this was last called, in order of first appearance."""
        return dict(self.handle.take_phases())

    def take_weight_bytes(self) -> int:
        """Bytes of packed experts that products read, from memory or caches, since this was last called."""
        return int(self.handle.take_weight_bytes())

    def spin_for(self, seconds: float) -> float:
        """Set how long a thread spins for its next work before it sleeps. Returns the time that was set before.

        Spinning threads take the time of their cores, unless another thread waits for these, and wake at once.
        """
        return float(self.handle.spin_for(seconds))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Messages for a person about what makes this machine slower than it could be."""
        status = topology()["mbind"]
        if self.nodes > 1 and status != "ok":
            return (
                f"memory cannot be bound to NUMA nodes here ({status}): experts may lie far from their threads. In a "
                "container allow the mbind system call, for instance docker run --cap-add SYS_NICE",
            )
        return ()


@functools.cache
def runtime(threads: int | None = None, numa_nodes: int | None = None, isa: str | None = None) -> Runtime:
    """The process's runtime for these settings, made on first use.

    Args:
        threads: the number of threads that compute; None for one per physical core that affinity and cgroup allow. If
            there are more threads than CPUs, they share the CPUs.
        numa_nodes: the number of parts into which the experts are split; None for the machine's nodes. A number above
            the machine's emulates the split.
        isa: the ISA of the kernels; None for `default_isa()`.

    Raises:
        ValueError: a number is below 1, or the ISA cannot run here.
        OSError: the system refuses to start this many threads; the message names its limits.
    """
    for name, count in (("threads", threads), ("numa_nodes", numa_nodes)):
        if count is not None and (isinstance(count, bool) or operator.index(count) < 1):
            raise ValueError(f"{name} is {count!r}; give a whole number of at least 1, or None")
    try:
        return Runtime(core.Runtime(isa or default_isa(), threads or 0, numa_nodes or 0))
    except RuntimeError as error:  # the system refused a thread, so this becomes a system error
        raise OSError(str(error)) from None


def check_machine(threads: int | None, numa_nodes: int | None) -> None:
    """Refuse more threads or NUMA nodes than this process may use. `runtime` itself can emulate any machine.

    Raises:
        ValueError: there are fewer CPUs or NUMA nodes than the user asks for, and `KTFT_EMULATE_CPUS` is not set.
    """
    if config.emulate_cpus():
        return
    found = topology()
    cpus, quota = sum(len(node["cpus"]) for node in found["nodes"]), found["cgroup_cpus"]
    most = cpus if quota is None else min(cpus, max(math.ceil(quota), 1))
    if threads is not None and threads > most:
        limit = "" if quota is None else f", with a cgroup quota of {quota:g}"
        raise ValueError(
            f"threads is {threads}, but this process may use {cpus} CPU{'s' * (cpus > 1)}{limit}: set threads to at "
            f"most {most}, or leave it out for one thread per physical core, which is {found['cores']}"
        )
    nodes = len(found["nodes"])
    if numa_nodes is not None and numa_nodes > nodes:
        raise ValueError(
            f"numa_nodes is {numa_nodes}, but this process may use {nodes} NUMA node{'s' * (nodes > 1)}: set "
            f"numa_nodes to at most {nodes}, or leave it out for all of them"
        )


def runtime_of(settings: Settings) -> Runtime:
    """The runtime that a user's settings ask for.

    Raises:
        ValueError: this machine does not have what they ask for; see `check_machine`.
    """
    check_machine(settings.threads, settings.numa_nodes)
    return runtime(settings.threads, settings.numa_nodes, settings.isa)


def compute_ceilings(runtime: Runtime, seconds: float = 0.01) -> tuple[float, float]:
    """Measures the FLOP/s of all the runtime's threads together, for twice `seconds`.

    Returns:
        P, for products of registers only, and H, for the forward kernel's inner loop on operands in L1 and L2 without
        decoding.
    """
    measure, handle = core.measure_flops, runtime.handle
    return float(measure(handle, core.Ceiling.registers, seconds)), float(measure(handle, core.Ceiling.hot, seconds))


class StreamedMemory:
    """Memory for measuring the ceilings of operands outside of the caches. `bytes` must far exceed the caches' size."""

    def __init__(self, runtime: Runtime, bytes: int) -> None:
        self._native = core.StreamedMemory(runtime.handle, bytes)

    def read(self) -> float:
        """Bytes per second of all threads together when they read the whole memory once."""
        return float(self._native.read())

    def update(self) -> float:
        """Bytes per second of all threads together in AdamW's mix: of four lines read, three are written in place."""
        return float(self._native.update())

    def gemm(self, tokens: int, reduction: int) -> float:
        """FLOP/s of the bf16 forward GEMM alone on all threads (S).

        The whole memory is read once as weights of `reduction` columns (a multiple of 32) and multiplied with the same
        1 to 704 tokens. The results are not used.
        """
        return float(self._native.gemm(tokens, reduction))
