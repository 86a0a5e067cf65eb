"""Reads what Linux says about memory (totals, cgroup limits, this process, transparent hugepages) and the CPU; how a
process of ktft ends.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from ktft import config

ROOT = Path("/")
GIB = 1 << 30
# cgroup v1 writes "no limit" as the largest page-aligned 64-bit number.
NO_LIMIT = 1 << 60


def readable(size: float) -> str:
    """The size in GiB, or in MiB if it is below 1 GiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB or not size else f"{size / 2**20:,.1f} MiB"


def read(path: Path) -> str | None:
    """The file's text without the trailing newline; None if it cannot be read.

    A cgroup's name can have any bytes: those that are not text are kept in the way of `os.fsdecode`.
    """
    try:
        return os.fsdecode(path.read_bytes()).strip()
    except OSError:
        return None


def read_list(path: Path) -> set[int]:
    """The numbers in a file such as `0-3,8`, the kernel's form for CPUs; empty if it cannot be read."""
    ranges = (part.partition("-") for part in (read(path) or "").split(",") if part)
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def memory(root: Path = ROOT) -> dict[str, int]:
    """The rows of /proc/meminfo in bytes, by its own names (`MemTotal`, `MemAvailable`, ...)."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", read(root / "proc/meminfo") or "", re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in lines}


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, str, str, str]]:
    """The folders of this process's cgroup and its parents. Each comes with the names of the files for its limit and
    its usage, and with the name of the row for memory that can be reclaimed.
    """
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        here = mount / path.lstrip("/")
        for folder in (here, *here.parents):
            yield folder, *names
            if folder == mount:
                break


def _limit(folder: Path, name: str) -> int | None:
    text = read(folder / name)
    return int(text) if text and text.isdecimal() and int(text) < NO_LIMIT else None


def cgroup_memory_limit(root: Path = ROOT) -> int | None:
    """The smallest memory limit in bytes of this process's cgroup and its parents; None if there is no limit."""
    limits = (_limit(folder, name) for folder, name, _, _ in _cgroup_folders(root))
    return min((limit for limit in limits if limit is not None), default=None)


def available_memory(root: Path = ROOT) -> int:
    """Bytes that this process can still take without swapping or being killed. The host, every cgroup above the process
    and `KTFT_MEMORY_LIMIT` each set a limit; the smallest counts.

    File pages that were not used lately count as free.
    """
    found = [memory(root).get("MemAvailable", 0)]
    for folder, limit_name, used_name, reclaimable in _cgroup_folders(root):
        limit, used = _limit(folder, limit_name), read(folder / used_name)
        if limit is not None and used and used.isdecimal():
            stat = re.search(rf"^{reclaimable} (\d+)$", read(folder / "memory.stat") or "", re.MULTILINE)
            found.append(max(limit - int(used) + (int(stat[1]) if stat else 0), 0))
    given = config.memory_limit()
    return min(found if given is None else [*found, given])


def transparent_hugepages(root: Path = ROOT) -> str | None:
    """The kernel's setting: `always`, `madvise` or `never`; None if the kernel does not have it."""
    text = read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen.group(1) if chosen else None


def peak_rss() -> int:
    """The most bytes that this process has held in memory so far, file-mapped pages included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_name(root: Path = ROOT) -> str:
    """The CPU's model name."""
    lines = (read(root / "proc/cpuinfo") or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def end_without_collections() -> None:
    """Let this process end without looking for cycles in all that it has imported, which takes Python seconds."""
    atexit.register(gc.freeze)
