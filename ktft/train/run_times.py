"""Times of a run for the training report and the log: for each step, and for each layer by lane."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ktft import system
from ktft.device import accelerator
from ktft.spans import KINDS, PARALLEL, Sum, Sums

Row = dict[str, float | None]

TIMES = (*KINDS, "other")
"""Parts of a step in seconds, as the training thread spent them. They add up to `seconds`."""
BUSY = tuple(f"busy_{name}" for name in PARALLEL)
"""Seconds of a step in which each lane was busy, alone or beside others."""
ROOM = ("ram_free_bytes", "gpu_free_bytes")
"""Free memory, at its lowest."""

LOGGED = (
    "logged as ktft/..., means of the steps since the line before: step_s, seconds of a step; wait_s, of these spent "
    "waiting for a GPU or another thread; attention_s, cpu_s, stream_s, resident_s, copy_in_s, copy_out_s, seconds "
    "that attention, experts on the CPU, on the GPU with copied and with resident weights, and copies were at work; "
    "tokens_per_s; ram_free_gib and vram_free_gib, memory left"
)
"""The meaning of the names that `Since` logs."""


def times_of(seconds: float, sums: Sums) -> Row:
    """The values of `TIMES` and `BUSY` for one step."""
    times, busy = dict.fromkeys(KINDS, 0.0), dict.fromkeys(PARALLEL, 0.0)
    for (name, _), found in sums.items():
        times[name] += found.waited
        if name in busy:
            busy[name] += found.seconds
    other = seconds - sum(times.values())
    return {**times, "other": other, **{f"busy_{name}": value for name, value in busy.items()}}


def memory_now() -> Row:
    """The peaks so far (resident bytes of this process, bytes on its GPU) and the free memory; None without a GPU.

    Free GPU memory is what remained at the peak of the memory that other processes and this process's cap leave to it.
    """
    device = accelerator()
    gpu, free = device.peak_bytes() if device is not None and device.is_initialized() else (None, None)
    return {
        "rss_bytes": system.peak_rss(),
        "gpu_bytes": gpu,
        "ram_free_bytes": system.available_memory(),
        "gpu_free_bytes": free,
    }


@dataclass
class Since:
    """Sums over the steps since the Trainer last logged."""

    steps: int = 0
    totals: dict[str, float] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.steps += 1
        for name in ("seconds", "tokens", "wait", *BUSY):
            self.totals[name] = self.totals.get(name, 0.0) + (row[name] or 0.0)
        self.totals |= {name: row[name] or 0.0 for name in ROOM if row[name] is not None}

    def take(self) -> dict[str, float]:
        """The numbers for the log, with mean seconds per step; empty if there was no step. Resets the sums."""
        steps, totals = self.steps, self.totals
        self.steps, self.totals = 0, {}
        if not steps or not totals["seconds"]:
            return {}
        seconds = {"step": totals["seconds"], "wait": totals["wait"]}
        seconds |= {name: totals[f"busy_{name}"] for name in PARALLEL}
        logs = {f"ktft/{name}_s": value / steps for name, value in seconds.items() if value > totals["seconds"] / 1000}
        logs["ktft/tokens_per_s"] = totals["tokens"] / totals["seconds"]
        for name, key in zip(ROOM, ("ktft/ram_free_gib", "ktft/vram_free_gib"), strict=True):
            if name in totals:
                logs[key] = totals[name] / system.GIB
        return {key: float(f"{value:.4g}") for key, value in logs.items()}


@dataclass
class OwnTimes:
    """What one rank did since its process began: sums over its steps, and the (token, expert) pairs of its experts."""

    steps: int = 0
    expert_tokens: int = 0
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("seconds", *TIMES), 0.0))

    def add(self, row: Row, expert_tokens: int) -> None:
        self.steps += 1
        self.expert_tokens += expert_tokens
        for name in self.totals:
            self.totals[name] += row[name] or 0.0

    def content(self) -> dict[str, Any]:
        """The rank's row in the report: seconds are means of a step, and memory is the peak."""
        device, memory = accelerator(), memory_now()
        return {
            "machine": socket.gethostname(),
            "device": "CPU" if device is None else device.name(),
            "steps": self.steps,
            "expert_tokens": self.expert_tokens,
            **{name: round(total / max(self.steps, 1), 6) for name, total in self.totals.items()},
            **{name: memory[name] for name in ("rss_bytes", "gpu_bytes")},
        }


@dataclass
class RunSums:
    """Sums of all steps, by name and layer."""

    sums: Sums = field(default_factory=dict)

    def add(self, sums: Sums) -> None:
        for key, more in sums.items():
            self.sums.setdefault(key, Sum()).add(more)

    def content(self) -> dict[str, Any]:
        """Name -> columns with one value per layer; the layer is null for spans that belong to no layer."""
        content: dict[str, Any] = {}
        for name in KINDS:
            rows = {layer: found for (n, layer), found in self.sums.items() if n == name}
            layers = sorted(rows, key=lambda layer: -1 if layer is None else layer)
            if layers:
                found = [rows[layer] for layer in layers]
                content[name] = {
                    "layers": layers,
                    "count": [s.count for s in found],
                    **{key: [round(getattr(s, key), 6) for s in found] for key in ("seconds", "waited", "expected")},
                    **{key: [int(getattr(s, key)) for s in found] for key in ("bytes", "flops")},
                }
        return content

    def load(self, content: Mapping[str, Any]) -> None:
        """Add the sums that `content` gave."""
        for name, columns in content.items():
            keys = [key for key in columns if key != "layers"]
            for layer, *values in zip(columns["layers"], *(columns[key] for key in keys), strict=True):
                self.add({(name, layer): Sum(**dict(zip(keys, values, strict=True)))})


def lane_rates(spans: Mapping[str, Any], seconds: float) -> dict[str, dict[str, float | None]]:
    """For each lane that ran: busy and expected seconds, share of the run's time, and GB/s and TFLOPS while busy.

    `spans` is the result of `RunSums.content`, `seconds` the time of all steps.
    """
    rates: dict[str, dict[str, float | None]] = {}
    for name in PARALLEL:
        if name not in spans:
            continue
        total = {key: sum(spans[name][key]) for key in ("seconds", "expected", "bytes", "flops")}
        busy = total["seconds"]
        rates[name] = {
            "seconds": round(busy, 6),
            "share": round(busy / seconds, 4) if seconds else None,
            "gb_per_s": float(f"{total['bytes'] / busy / 1e9:.4g}") if busy and total["bytes"] else None,
            "tflops": float(f"{total['flops'] / busy / 1e12:.4g}") if busy and total["flops"] else None,
            "expected_seconds": round(total["expected"], 6) if total["expected"] else None,
        }
    return rates
