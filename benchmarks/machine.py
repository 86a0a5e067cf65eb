"""The machine's caches and memory, which determine the sizes of the benchmark, and the packages installed on it."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from ktft import system
from ktft.sizes import parse_count

ROOT = Path("/")
# The share of free memory for ktft's copies; each peer's copies take as much again.
MEMORY_SHARE = 0.15
MAX_COPIES = 64
CACHE_MULTIPLE = 4
NO_CACHE_FILES = 32 << 20


def not_installed(*modules: str) -> str:
    """Which of these modules are missing, for a person; empty if none is."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def cache_bytes(root: Path = ROOT) -> int:
    """Bytes of all last-level caches that this process's CPUs reach; 32 MiB if Linux does not report them."""
    caches: dict[str, int] = {}
    for cpu in os.sched_getaffinity(0):
        levels = sorted((root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"))
        if levels:
            size = (levels[-1] / "size").read_text().strip()
            shared = (levels[-1] / "shared_cpu_list").read_text()
            caches[shared] = parse_count(size, 1024)
    return sum(caches.values()) or NO_CACHE_FILES


def free_bytes() -> int:
    """Bytes of memory that Linux can give without swapping. Limits of cgroups are ignored."""
    return system.memory()["MemAvailable"]


def read_bytes() -> int:
    """Bytes of the buffer that measures read bandwidth, which is far larger than the caches."""
    return int(min(max(2 * CACHE_MULTIPLE * cache_bytes(), 256 << 20), MEMORY_SHARE * free_bytes()))


def copies(layer_bytes: int) -> int:
    """The number of layers to rotate over, which together are several times as large as the caches."""
    wanted = -(-CACHE_MULTIPLE * cache_bytes() // layer_bytes)
    return int(max(1, min(wanted, MAX_COPIES, MEMORY_SHARE * free_bytes() // layer_bytes)))
