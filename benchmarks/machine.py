"""What sizes the benchmark: caches and memory of this machine."""

from __future__ import annotations

import os
from pathlib import Path

from ktft.sizes import parse_count

ROOT = Path("/")
# Of what is free, for ktft's copies, and as much again for each peer's.
MEMORY_SHARE = 0.15
MAX_COPIES = 64
CACHE_MULTIPLE = 4
NO_CACHE_FILES = 32 << 20


def cache_bytes(root: Path = ROOT) -> int:
    """Last-level caches that this process's CPUs reach, together; 32 MiB where Linux does not tell."""
    caches: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0):
        levels = sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"))
        if levels:
            size = (levels[-1] / "size").read_text().strip()
            shared = (levels[-1] / "shared_cpu_list").read_text()
            caches[shared] = parse_count(size, 1024)
    return sum(caches.values()) or NO_CACHE_FILES


def free_bytes(root: Path = ROOT) -> int:
    """Memory that Linux would give without swapping; cgroup limits are not looked at."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def read_bytes() -> int:
    """Size of the buffer that measures read bandwidth: far larger than the caches."""
    return int(min(max(2 * CACHE_MULTIPLE * cache_bytes(), 256 << 20), MEMORY_SHARE * free_bytes()))


def copies(layer_bytes: int) -> int:
    """Layers to rotate over, so that together they are several times the caches."""
    wanted = -(-CACHE_MULTIPLE * cache_bytes() // layer_bytes)
    return int(max(1, min(wanted, MAX_COPIES, MEMORY_SHARE * free_bytes() // layer_bytes)))
