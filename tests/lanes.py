"""A layer's experts in the arithmetic of `ktft.lanes`, chunk by chunk, as an autograd node for tests and scripts."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lanes import passes
from ktft.lanes.decide.costs import Rate, Rates
from ktft.lanes.gpu.call_memory import CallMemory, CutRows
from ktft.lanes.ops.chunk import chunk_backward, chunk_forward, decode, place
from ktft.lanes.ops.dropout import room_for_streams, write_streams
from ktft.lanes.ops.interface import KeptGates, Operations
from ktft.lanes.ops.weights import ChunkWeights, PackedExperts
from ktft.lanes.routes import PIECE_ROWS, Piece, Routes, lay_out
from ktft.lora import ExpertLora, LoraPair
from ktft.native import ExpertLayer


def blocks(layer: ExpertLayer, experts: list[int], device: torch.device) -> list[Tensor]:
    """These experts' packed bytes, a tensor for each slice."""

    def packed(address: int, size: int) -> Tensor:
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)

    return [
        torch.stack([packed(part.address + e * part.expert_bytes, part.expert_bytes) for e in experts]).to(device)
        for part in layer.slices()
    ]


def decoded(
    layer: ExpertLayer,
    experts: list[int],
    lora: ExpertLora | None,
    device: torch.device,
    ops: Operations | None = None,
    in_place: bool = False,
) -> ChunkWeights:
    """Decode these experts on the device, or `in_place` no more than products from packed bytes need."""
    packed = PackedExperts(layer.format, layer.slices(), blocks(layer, experts, device))
    weights = ChunkWeights.empty(layer, len(experts), lora, device)
    for matrix in (weights.gate_up, weights.down):
        matrix.values.fill_(torch.nan)
    if in_place:
        weights = replace(weights, packed=packed)
    decode(packed, weights, ops)
    return weights


def adapters(lora: ExpertLora | None, experts: list[int], device: torch.device) -> ExpertLora | None:
    """The adapters of these experts, on the device."""
    if lora is None:
        return None
    pairs = {
        name: LoraPair(*(t.detach()[experts].to(device) for t in (pair.a, pair.b)), pair.scaling)
        for name, pair in lora.pairs.items()
    }
    streams = write_streams(lora, room_for_streams(device))
    return ExpertLora(pairs, lora.dropout, lora.seed, streams=streams)


@pytest.fixture
def no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed rates instead of measured ones, so that timings do not decide where experts run."""
    rate = {work: Rate(1e12, 1e11, 1e-5) for work in ("forward", "backward")}
    monkeypatch.setattr(passes, "measured_rates", lambda *_: Rates(rate, rate, 5e10, 5e10, 1e-5))


class Lane:
    """Runs the given experts in chunks, in their order.

    Args:
        device: where they run.
        ops: an implementation of the operations; by default the device's.
        experts: which ones; by default all.
        chunk: how many experts a chunk has.
        piece_rows: see `lay_out`.
        steady: the device alone knows which rows an expert has.
        in_place: products read packed bytes.
        keeps: gate and up are kept from forward for backward.
    """

    def __init__(
        self,
        device: str = "cpu",
        ops: Operations | None = None,
        experts: list[int] | None = None,
        chunk: int = 2,
        piece_rows: int = PIECE_ROWS,
        steady: bool = False,
        in_place: bool = False,
        keeps: bool = False,
    ) -> None:
        self.device, self.ops, self.experts = torch.device(device), ops, experts
        self.chunk, self.piece_rows, self.steady, self.in_place = chunk, piece_rows, steady, in_place
        self.keeps = keeps

    def __call__(
        self,
        layer: ExpertLayer,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        lora: ExpertLora | None = None,
        activation: str = "recompute",
    ) -> Tensor:
        """Takes the arguments of `ktft.model.autograd.routed_experts`."""
        parameters = lora.parameters() if lora is not None else []
        out = _Experts.apply(self, layer, lora, x, index, weights, *parameters)
        assert isinstance(out, Tensor)
        return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        lane: Lane,
        layer: ExpertLayer,
        lora: ExpertLora | None,
        x: Tensor,
        index: Tensor,
        weights: Tensor,
        *ab: Tensor,
    ) -> Tensor:
        counts = torch.bincount(index[index >= 0], minlength=layer.num_experts).tolist()
        experts = lane.experts or list(range(layer.num_experts))
        ctx.chunks = [experts[i : i + lane.chunk] for i in range(0, len(experts), lane.chunk)]
        ctx.inputs = x.detach().to(lane.device), weights.detach().float().to(lane.device)
        on_device = index.to(lane.device)
        if lane.steady:
            ctx.rows = steady_rows(ctx.inputs[0], on_device, ctx.chunks, lane.piece_rows)
        else:
            ctx.rows = lay_out(Routes(on_device, counts), ctx.chunks, lane.piece_rows)
        ctx.lane, ctx.layer, ctx.lora, ctx.kept = lane, layer, lora, None
        if lane.keeps:
            columns = (2 if layer.swiglu.gated else 1) * layer.intermediate_size
            gates = torch.empty(index.numel(), columns, dtype=torch.bfloat16, device=lane.device)
            ctx.kept = KeptGates(gates, torch.tensor([gates.data_ptr()], device=lane.device))
        out = torch.zeros(x.shape, device=lane.device)
        for chunk, rows in zip(ctx.chunks, ctx.rows, strict=True):
            decoded_weights = decoded(layer, chunk, lora, lane.device, lane.ops, lane.in_place)
            place(part := adapters(lora, chunk, lane.device), decoded_weights, lane.ops)
            chunk_forward(decoded_weights, part, rows, *ctx.inputs, layer.swiglu, out, lane.ops, ctx.kept)
        return out.to(x.device, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        lane, layer, lora, (x, weights) = ctx.lane, ctx.layer, ctx.lora, ctx.inputs
        grad = grad_outputs[0].to(lane.device, x.dtype).contiguous()
        grad_x, grad_weights = torch.zeros(x.shape, device=lane.device), torch.zeros_like(weights)
        lora_grads = [torch.zeros(p.shape) for p in (lora.parameters() if lora else [])]
        for chunk, rows in zip(ctx.chunks, ctx.rows, strict=True):
            decoded_weights = decoded(layer, chunk, lora, lane.device, lane.ops, lane.in_place)
            place(part := adapters(lora, chunk, lane.device), decoded_weights, lane.ops)
            found = chunk_backward(
                decoded_weights, part, rows, x, weights, layer.swiglu, grad, grad_x, grad_weights, lane.ops,
                kept=ctx.kept,
            )  # fmt: skip
            for total, of_chunk in zip(lora_grads, found, strict=True):
                total[chunk] = of_chunk.cpu()
        host = grad_outputs[0].device
        return None, None, None, grad_x.to(host, x.dtype), None, grad_weights.to(host), *lora_grads


def steady_rows(x: Tensor, index: Tensor, chunks: list[list[int]], piece_rows: int) -> list[list[Piece]]:
    """What `lay_out` gives, as steady passes make it."""
    memory = CallMemory(x, index.shape[1], sum(map(len, chunks)))
    memory.index.copy_(index)
    cut = CutRows(tuple(map(len, chunks)), piece_rows)
    memory.begin(cut)
    return [memory.pieces(cut, number) for number in range(len(chunks))]


def exact(layer: ExpertLayer, experts: list[int]) -> tuple[Tensor, Tensor]:
    """What `decoded` must give with its scales applied: gate and up, and down, from the native layer in fp32."""
    gate, up, down = (torch.stack([layer.dequantize(e, name) for e in experts]) for name in PROJECTIONS)
    return torch.cat((gate, up), dim=1), down
