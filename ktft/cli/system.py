"""What Linux says of memory: totals, cgroup limits, transparent hugepages."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path("/")
GIB = 1 << 30
# cgroup v1 writes "no limit" as the largest page-aligned 64-bit number.
NO_LIMIT = 1 << 60


def gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def read(path: Path) -> str | None:
    """The file's text without the trailing newline, None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None


def memory(root: Path = ROOT) -> dict[str, int]:
    """/proc/meminfo in bytes, by its own names (`MemTotal`, `MemAvailable`, ...)."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", read(root / "proc/meminfo") or "", re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in lines}


def cgroup_memory_limit(root: Path = ROOT) -> int | None:
    """The smallest memory limit in bytes of this process's cgroup and its parents, None if there is no limit."""
    limits = []
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        here = mount / path.lstrip("/")
        for folder in (here, *here.parents):
            limits.append(read(folder / name))
            if folder == mount:
                break
    numbers = [int(limit) for limit in limits if limit and limit.isdecimal()]
    return min((n for n in numbers if n < NO_LIMIT), default=None)


def transparent_hugepages(root: Path = ROOT) -> str | None:
    """`always`, `madvise` or `never`; None where the kernel has no such setting."""
    text = read(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen.group(1) if chosen else None
