"""TEMPORARY torch stand-in with the final interface of native.py, so that the Python side can be built beside the C++ core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktft.lora import ExpertLora

FORMATS = ("bf16", "int8")


@dataclass(frozen=True)
class Runtime:
    """Pinned thread pools over NUMA nodes, shared by all layers of a process with the same settings."""

    isa: str
    threads: int
    nodes: int
    warnings: tuple[str, ...] = ()


_RUNTIMES: dict[Any, Runtime] = {}


def runtime(threads: int | None = None, numa_nodes: int | None = None) -> Runtime:
    key = (threads, numa_nodes)
    if key not in _RUNTIMES:
        _RUNTIMES[key] = Runtime("scalar", threads or 1, numa_nodes or 1)
    return _RUNTIMES[key]


@dataclass
class Gradients:
    hidden_states: Tensor
    top_k_weights: Tensor
    lora: list[Tensor]  # a, b of gate_proj, up_proj, down_proj, those present, in this order


class ExpertLayer:
    """One layer's packed routed experts. name is used in error messages."""

    def __init__(self, runtime: Runtime, *, num_experts: int, hidden_size: int, intermediate_size: int,
                 format: str, name: str = "experts") -> None:
        if hidden_size % 32 or intermediate_size % 32:
            raise ValueError(f"{name}: hidden_size {hidden_size} and moe_intermediate_size {intermediate_size} must be multiples of 32")
        if format not in FORMATS:
            raise ValueError(format)
        self.runtime, self.num_experts, self.hidden_size, self.intermediate_size = runtime, num_experts, hidden_size, intermediate_size
        self.format, self.name = format, name
        self._w: dict[tuple[int, str], Tensor] = {}

    @property
    def packed_bytes(self) -> int:
        return 3 * self.num_experts * self.hidden_size * self.intermediate_size * (2 if self.format == "bf16" else 1)

    def load(self, expert: int, projection: str, weight: Tensor) -> None:
        """Pack one [out_features, in_features] float CPU weight. ValueError on wrong shape, dtype, NaN/Inf, or loaded twice."""
        w = weight.float()
        if self.format == "int8":
            s = w.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
            w = (w / s).round() * s
        else:
            w = w.bfloat16().float()
        self._w[expert, projection] = w

    def missing(self) -> list[tuple[int, str]]:
        return [(e, p) for e in range(self.num_experts) for p in ("gate_proj", "up_proj", "down_proj") if (e, p) not in self._w]

    def dequantize(self, expert: int, projection: str) -> Tensor:
        return self._w[expert, projection]

    def _run(self, x: Tensor, i: Tensor, w: Tensor, lora: ExpertLora | None) -> Tensor:
        from ktft import reference
        if x.isnan().any():
            raise ValueError(f"{self.name}: hidden states hold NaN")
        s = {p: torch.stack([self._w[e, p] for e in range(self.num_experts)]) for p in ("gate_proj", "up_proj", "down_proj")}
        return reference.moe(x, i, w, s["gate_proj"], s["up_proj"], s["down_proj"], lora)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: ExpertLora | None,
                activation: str) -> tuple[Tensor, Any]:
        """CPU tensors. activation: retain | recompute | none (no backward will follow). Returns output and what backward needs."""
        with torch.no_grad():
            return self._run(hidden_states, top_k_index, top_k_weights, lora), None

    def backward(self, saved: Any, grad_output: Tensor, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor,
                 lora: ExpertLora | None) -> Gradients:
        from ktft.lora import LoraPair
        with torch.enable_grad():
            x = hidden_states.detach().requires_grad_()
            w = top_k_weights.detach().requires_grad_()
            pairs = {p: LoraPair(v.a.detach().requires_grad_(), v.b.detach().requires_grad_(), v.scaling)
                     for p in ("gate_proj", "up_proj", "down_proj") if lora and (v := lora.pairs.get(p))}
            y = self._run(x, top_k_index, w, ExpertLora(pairs))
            flat = [t for v in pairs.values() for t in (v.a, v.b)]
            g = torch.autograd.grad(y, [x, w, *flat], grad_output, allow_unused=True)
            g = [t if t is not None else torch.zeros_like(s) for t, s in zip(g, [x, w, *flat])]
        return Gradients(g[0], g[1], list(g[2:]))


def cpu_features() -> dict[str, bool]:
    """Feature name (avx2, fma, avx512, avx512_bf16, avx512_vnni, amx_tile, amx_bf16, amx_int8) -> usable here."""
    return {"avx2": True}


def isas() -> list[str]:
    """ISAs this CPU can run, slowest first: scalar, avx2, avx512, avx512_bf16."""
    return ["scalar"]


def topology() -> dict[str, Any]:
    """{'nodes': [{'id', 'cpus': [..], 'cores': n, 'memory_bytes', 'free_bytes'}], 'cgroup_cpus': float|None, 'mbind': 'ok'|reason}"""
    return {"nodes": [{"id": 0, "cpus": [0, 1], "cores": 2, "memory_bytes": 1, "free_bytes": 1}], "cgroup_cpus": None, "mbind": "ok"}
