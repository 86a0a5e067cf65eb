"""What this machine has, and the threads that compute on it."""

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
    """CPU feature name -> whether this process can use it (AMX: granted by the operating system)."""
    return dict(core.cpu_features())


def isas() -> list[str]:
    """ISAs this CPU runs, slowest first; `runtime` takes the last one unless KTFT_ISA names another."""
    return list(core.isas())


def default_isa() -> str:
    """The ISA that `runtime` takes. Raises ValueError when KTFT_ISA is unknown or cannot run here."""
    return str(core.default_isa())


def topology() -> dict[str, Any]:
    """CPUs and memory this process may use.

    Returns `nodes` (`id`, `cpus`, physical `cores`, `memory_bytes`, `free_bytes` each), `cgroup_cpus` (CPU quota or
    None), `cores` (physical cores within the quota) and `mbind` ("ok" or why memory cannot be placed on a node).
    """
    return dict(core.topology())


def packed_bytes(
    num_experts: int, hidden_size: int, intermediate_size: int, format: str, nodes: int, biases: bool = False
) -> list[int]:
    """Bytes that each NUMA node would hold of one layer's experts; fewer entries where the columns do not go round.

    Raises:
        ValueError: dims that the kernels cannot take, or an unknown format.
    """
    return list(core.packed_bytes(num_experts, hidden_size, intermediate_size, format, biases, nodes))


class LayerMemory(NamedTuple):
    """Bytes of the buffers that all layers of a runtime share, and of what one layer retains for its backward."""

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
) -> LayerMemory:
    """Memory that a layer's calls will take, computed by the code that allocates it.

    Args:
        ranks: LoRA ranks by projection; 0 or absent where there is no LoRA.
        rows: (token, expert) pairs of one call; experts: how many experts they reach, as an expected value.
        threads, nodes: of the runtime.
        activation: `retain`, `recompute`, or `none` for a forward without a backward.
    """
    by_projection = [ranks.get(name, 0) for name in PROJECTIONS]
    keep = getattr(core.Keep, activation)
    return LayerMemory(
        *core.layer_memory(hidden_size, intermediate_size, biases, by_projection, rows, experts, threads, nodes, keep)
    )


def kernels() -> list[dict[str, Any]]:
    """The kernel table: `name`, `isa`, `format`, `backward` of each row."""
    return list(core.kernels())


@dataclass(frozen=True)
class Runtime:
    """Thread pools and workspace, shared by all layers of a process with the same settings."""

    handle: Any

    @property
    def isa(self) -> str:
        """Name of the ISA whose kernels run."""
        return str(self.handle.isa)

    @property
    def threads(self) -> int:
        """Threads that compute, the calling one included."""
        return int(self.handle.threads)

    @property
    def nodes(self) -> int:
        """NUMA nodes the experts are spread over."""
        return int(self.handle.nodes)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of buffers that grew to the largest call so far."""
        return int(self.handle.workspace_bytes)

    def take_phases(self) -> dict[str, float]:
        """Seconds that layer calls spent in each phase since this was last called, in order of first appearance."""
        return dict(self.handle.take_phases())

    def take_weight_bytes(self) -> int:
        """Bytes of packed experts that products read from memory or caches since this was last called."""
        return int(self.handle.take_weight_bytes())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes this machine slower than it could be, for a person."""
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
        threads: threads that compute; None for one per physical core that affinity and cgroup allow. More than there
            are CPUs share them.
        numa_nodes: parts to split the experts into; None for the machine's nodes. More than it has emulates a split.
        isa: kernel ISA; None for `default_isa()`.

    Raises:
        ValueError: a number below 1, or an ISA that cannot run here.
        OSError: the system refuses to start so many threads; the message names its limits.
    """
    for name, count in (("threads", threads), ("numa_nodes", numa_nodes)):
        if count is not None and (isinstance(count, bool) or operator.index(count) < 1):
            raise ValueError(f"{name} is {count!r}; give a whole number of at least 1, or None")
    try:
        return Runtime(core.Runtime(isa or default_isa(), threads or 0, numa_nodes or 0))
    except RuntimeError as error:  # the system's refusal of a thread, and so its kind of error
        raise OSError(str(error)) from None


def check_machine(threads: int | None, numa_nodes: int | None) -> None:
    """Hold what a user asks for against what this process may use. `runtime` itself emulates any machine.

    Raises:
        ValueError: more threads than CPUs, or more NUMA nodes than there are, unless `KTFT_EMULATE_CPUS` is set.
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
        ValueError: this machine does not have it; see `check_machine`.
    """
    check_machine(settings.threads, settings.numa_nodes)
    return runtime(settings.threads, settings.numa_nodes, settings.isa)
