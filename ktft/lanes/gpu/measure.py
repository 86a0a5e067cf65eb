"""Measures the rates of a GPU lane with one of its layers."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ktft.lanes.decide.calibrate import Probes, calibrate, copy_seconds, cpu_probe, gpu_probe
from ktft.lanes.decide.costs import LayerKind, Rates
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.ops.chunk import chunk_backward, chunk_forward
from ktft.lanes.ops.decode import decode, place
from ktft.lanes.ops.weights import ChunkWeights
from ktft.lanes.routes import Routes, lay_out
from ktft.lanes.terms import Work
from ktft.lora import ExpertLora, LoraPair
from ktft.native import ExpertLayer

_CHUNK = 32
"""How many experts are decoded and multiplied at once: about as many as a chunk of the lane has."""


def measured_rates(lane: GpuLane, layer: ExpertLayer, kind: LayerKind, lora: ExpertLora | None) -> Rates:
    """Measure this machine's rates with one of a model's own layers, in some seconds."""
    probes = Probes(
        cpu=cpu_probe(layer, lora, recompute=True),
        gpu=gpu_probe(lane.device, _GpuProbe(lane, layer, lora)),
        copy=copy_seconds(lane.device),
    )
    with torch.no_grad():
        return calibrate(kind, probes)


class _GpuProbe:
    """Probes the GPU: decodes and multiplies the same few experts again and again."""

    def __init__(self, lane: GpuLane, layer: ExpertLayer, lora: ExpertLora | None) -> None:
        self._layer, self._device = layer, lane.device
        self._experts = min(_CHUNK, layer.num_experts)
        self._slices = layer.slices()
        self._blocks = [
            _host(part.address, part.expert_bytes * self._experts).view(self._experts, -1).to(lane.device)
            for part in self._slices
        ]
        self._lora = None if lora is None else self._on_device(lora)

    def _on_device(self, lora: ExpertLora) -> ExpertLora:
        def few(tensor: Tensor) -> Tensor:
            return tensor.detach()[: self._experts].to(self._device)

        pairs = {name: LoraPair(few(pair.a), few(pair.b), pair.scaling) for name, pair in lora.pairs.items()}
        return ExpertLora(pairs, lora.dropout, lora.seed)

    def __call__(self, work: Work, experts: int, rows: int) -> None:
        layer, device = self._layer, self._device
        hidden = torch.full((rows * self._experts, layer.hidden_size), 0.01, dtype=torch.bfloat16, device=device)
        index = torch.arange(self._experts, device=device).repeat_interleave(rows)[:, None]
        weights = torch.ones(index.shape, device=device)
        out, grad_weights = torch.zeros_like(hidden, dtype=torch.float32), torch.zeros_like(weights)
        chunk = list(range(self._experts))
        sizes = layer.hidden_size, layer.intermediate_size
        decoded = ChunkWeights.empty(layer.format, self._experts, *sizes, self._lora, layer.biases, device)
        (pieces,) = lay_out(Routes(index, [rows] * self._experts), [chunk])
        for _ in range(-(-experts // self._experts)):
            decode(layer.format, self._slices, self._blocks, decoded)
            place(self._lora, decoded)
            common = decoded, self._lora, pieces, hidden, weights, layer.swiglu
            if work == Work.FORWARD:
                chunk_forward(*common, out)
            else:
                chunk_backward(*common, hidden, out, grad_weights)


def _host(address: int, size: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
