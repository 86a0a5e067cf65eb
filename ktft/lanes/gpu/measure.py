"""Measures the rates of a GPU lane with one of its layers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ktft.lanes.decide.calibrate import Probes, calibrate, copy_seconds, cpu_probe, gpu_probe
from ktft.lanes.decide.costs import LayerKind, Rates
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.ops.chunk import chunk_backward, chunk_forward, decode, place
from ktft.lanes.ops.dropout import room_for_streams, write_streams
from ktft.lanes.ops.weights import ChunkWeights, PackedExperts
from ktft.lanes.routes import Routes, lay_out
from ktft.lanes.terms import Work
from ktft.lora import ExpertLora, LoraPair
from ktft.native import ExpertLayer

_CHUNK = 32
"""How many experts are decoded and multiplied at once: about as many as the lane does."""


def measured_rates(lane: GpuLane, layer: ExpertLayer, kind: LayerKind, lora: ExpertLora | None) -> Rates:
    """Measure this machine's rates with one of a model's own layers, in some seconds."""
    cpu, gpu = cpu_probe(layer, lora, recompute=True), gpu_probe(lane.device, _chunks(lane, layer, lora))
    with torch.no_grad():
        return calibrate(kind, Probes(cpu, gpu, copy_seconds(lane.device)))


def _chunks(lane: GpuLane, layer: ExpertLayer, lora: ExpertLora | None) -> Callable[[Work, int, int], None]:
    """Work for `gpu_probe`, which decodes and multiplies the same few experts again and again."""
    few, device, slices = min(_CHUNK, layer.num_experts), lane.device, layer.slices()

    def first(tensor: Tensor) -> Tensor:
        return tensor.detach()[:few].to(device)

    blocks = [_host(part.address, part.expert_bytes * few).view(few, -1).to(device) for part in slices]
    if lora is not None:
        pairs = {name: LoraPair(first(pair.a), first(pair.b), pair.scaling) for name, pair in lora.pairs.items()}
        lora = replace(lora, pairs=pairs, streams=write_streams(lora, room_for_streams(device)))

    def run(work: Work, experts: int, rows: int) -> None:
        hidden = torch.full((rows * few, layer.hidden_size), 0.01, dtype=torch.bfloat16, device=device)
        index = torch.arange(few, device=device).repeat_interleave(rows)[:, None]
        weights = torch.ones(index.shape, device=device)
        out, grad_weights = torch.zeros_like(hidden, dtype=torch.float32), torch.zeros_like(weights)
        decoded, packed = ChunkWeights.empty(layer, few, lora, device), PackedExperts(layer.format, slices, blocks)
        (pieces,) = lay_out(Routes(index, [rows] * few), [range(few)])
        for _ in range(-(-experts // few)):
            decode(packed, decoded)
            place(lora, decoded)
            common = decoded, lora, pieces, hidden, weights, layer.swiglu
            if work == Work.FORWARD:
                chunk_forward(*common, out)
            else:
                chunk_backward(*common, hidden, out, grad_weights)

    return run


def _host(address: int, size: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
