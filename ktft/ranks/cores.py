"""The CPU cores of a machine, divided among its ranks: each computes its experts on its own, near its GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ktft.ranks.launch import Launch
from ktft.system import read_list

_CPUS = Path("/sys/devices/system/cpu")
_PCI = Path("/sys/bus/pci/devices")


def divide(
    cores: Sequence[Sequence[int]], nodes: Mapping[int, int], near: Sequence[int | None], local_rank: int
) -> set[int]:
    """The CPUs of one rank, whole cores only. Ranks whose GPU is near a NUMA node get cores of it as far as they go.

    Args:
        cores: the CPUs of each physical core.
        nodes: CPU -> its NUMA node.
        near: the NUMA node of each rank's GPU; None if it has none, or nobody knows.
        local_rank: the rank, which counts `near`.
    """
    ranks = len(near)
    by_node = sorted(cores, key=lambda core: (nodes.get(core[0], 0), core[0]))
    if len(by_node) < ranks:
        return set(by_node[local_rank % len(by_node)])
    order = sorted(range(ranks), key=lambda rank: (near[rank] or 0, rank))
    place = order.index(local_rank)
    own = by_node[len(by_node) * place // ranks : len(by_node) * (place + 1) // ranks]
    return {cpu for core in own for cpu in core}


def keep_to_own_cores(launch: Launch, bus_ids: Sequence[str | None] = ()) -> set[int] | None:
    """Bind this process, and the threads that it starts from now on, to its share of the machine's cores.

    A process whose CPUs differ from its parent's was bound by its launcher, and stays as it is.

    Args:
        bus_ids: PCI addresses of the machine's GPUs, such as `0000:0f:00.0`, in the order of the local ranks that use
            them; ranks beyond them have none.

    Returns:
        Its CPUs; None if it was left as it is.
    """
    allowed = os.sched_getaffinity(0)
    if launch.local_ranks < 2 or allowed != os.sched_getaffinity(os.getppid()):
        return None
    cores = sorted({tuple(sorted(_siblings(cpu) & allowed)) for cpu in allowed})
    near = [node_of(bus_id) for bus_id in [*bus_ids, *[None] * launch.local_ranks][: launch.local_ranks]]
    own = divide(cores, _nodes(), near, launch.local_rank)
    os.sched_setaffinity(0, own)
    return own


def _siblings(cpu: int) -> set[int]:
    """The CPUs of the physical core that `cpu` is one of."""
    return read_list(_CPUS / f"cpu{cpu}/topology/thread_siblings_list") or {cpu}


def _nodes() -> dict[int, int]:
    found = Path("/sys/devices/system/node").glob("node[0-9]*")
    return {cpu: int(path.name.removeprefix("node")) for path in found for cpu in read_list(path / "cpulist")}


def node_of(bus_id: str | None) -> int | None:
    """The NUMA node that a PCI device is near; None if nobody knows."""
    try:
        node = int((_PCI / (bus_id or "") / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
