"""Resident experts, which stay on a GPU, as calls with few tokens use them: tables at fixed addresses for CUDA graphs.

Weights stay packed, in the blocks of `ktft.lanes.gpu.residents`, which long prefills use too. In bf16 they would take 4
times the memory of a 4-bit format, so a quarter of the experts would fit, and products take a few microseconds in
either.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.device import device_of
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.gpu.residents import Residents
from ktft.lanes.ops.interface import by_triton
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer
from ktft.native.hybrid import CallPlace
from ktft.native.packed import PackedSlice

RANK_STEP = 16
"""The room for ranks in the stacks is a multiple of this."""


@dataclass(frozen=True)
class Stack:
    """Where a resident's adapter lies in its row of the stacks.

    Each projection has A `[width, inputs]` and B `[outputs, width]`, bf16; B includes the scaling.

    Attributes:
        width: the largest rank, rounded up.
        a, b: projection -> where its A and B begin, in elements.
        size: elements of a row.
    """

    width: int
    a: dict[str, int]
    b: dict[str, int]
    size: int

    @classmethod
    def of(cls, layer: ExpertLayer, max_rank: int) -> Stack:
        """The layout for adapters of at most this rank."""
        width, at = -(-max_rank // RANK_STEP) * RANK_STEP, 0
        places: tuple[dict[str, int], dict[str, int]] = {}, {}
        for name in PROJECTIONS:
            for where, length in zip(places, _sizes(layer, name), strict=True):
                where[name] = at
                at += width * length
        return cls(width, *places, at)


def _sizes(layer: ExpertLayer, name: str) -> tuple[int, int]:
    """The number of inputs and of outputs of a projection."""
    both = layer.hidden_size, layer.intermediate_size
    return (both[1], both[0]) if name == "down_proj" else both


@dataclass(frozen=True)
class HotLayer:
    """One layer's residents on the device, at addresses that do not change, since CUDA graphs hold them.

    Attributes:
        layer: the packed experts.
        slices: the slices of an expert, each with the arena's bytes from where that slice of block 0 begins.
        block_bytes: bytes from one block to the next.
        table: `[E]` int32: each expert's block, -1 if it is not resident.
        heat: `[E]` int64: (token, expert) pairs of residents in calls with few tokens.
        stack: the layout of adapters; None if none will be served.
        stacks: bf16 `[blocks, places, size]`: the adapters of all layers.
        ranks: `[places, 3]` int32, the last in the order of `PROJECTIONS`: the adapters' ranks, 0 without LoRA.
    """

    layer: ExpertLayer
    slices: list[tuple[PackedSlice, Tensor]]
    block_bytes: int
    table: Tensor
    heat: Tensor
    stack: Stack | None
    stacks: Tensor | None
    ranks: Tensor


class HotOperations(Protocol):
    """One implementation, a module. Its shapes and the order of its sums are fixed; it never waits for the device."""

    def route(self, hot: HotLayer, top_k_index: Tensor) -> tuple[Tensor, Tensor]:
        """Divide the experts of `[T, k]` between the residents and the CPU, and count the residents' heat.

        Returns:
            The blocks of the residents, int32, -1 for all other experts; and `top_k_index` with `ELSEWHERE` in place of
            the residents.
        """

    def forward(
        self, hot: HotLayer, hidden: Tensor, blocks: Tensor, top_k_weights: Tensor, of_token: Tensor | None = None
    ) -> Tensor:
        """The residents' part of the output, fp32 `[T, H]`, from hidden states `[T, H]` and fp32 weights `[T, k]`.

        `of_token`, `[T]` int32, is the place of each token's adapter, -1 for none; no token has one without it.
        """


def operations(device: torch.device) -> HotOperations:
    """Triton's operations on a GPU, if Triton is installed and `KTFT_TRITON` is not 0; otherwise torch's."""
    chosen = "triton_resident" if by_triton(device) else "torch_resident"
    return cast(HotOperations, importlib.import_module(f"ktft.serve.runtime.{chosen}"))


class Handover(Protocol):
    """The module `ktft.serve.runtime.triton_handover`, which see."""

    def send(
        self,
        hot: HotLayer | None,
        place: CallPlace,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        of_token: Tensor | None = None,
    ) -> Tensor | None: ...

    def receive(self, place: CallPlace, part: Tensor | None, hidden: Tensor) -> Tensor: ...


def handover(device: torch.device) -> Handover | None:
    """What passes calls to the CPU's experts without copies; None where kernels do not reach host memory."""
    if not by_triton(device):
        return None
    return cast(Handover, importlib.import_module("ktft.serve.runtime.triton_handover"))


class HotExperts:
    """A model's residents for calls with few tokens.

    Blocks change between steps only: `follow` shows an expert after its bytes have arrived, and hides one before its
    block goes to another.

    Args:
        lane: multiplies the same blocks in prefill.
        budget: bytes for blocks and adapters.
        layers: the model's layers with experts, in order.
        max_rank: the largest rank of adapters; 0 if none will be served.
        places: how many adapters there may be.

    Attributes:
        residents: which experts are resident.
        layers: one `HotLayer` for each of the model's.
        heat: `[layers, experts]` int64: the heat of all layers.
        bytes: memory of the device that blocks and adapters take.

    Raises:
        torch.OutOfMemoryError: the device has no room.
        ValueError: not even one expert fits the budget.
    """

    def __init__(
        self, lane: GpuLane, budget: int, layers: Sequence[ExpertLayer], max_rank: int = 0, places: int = 1
    ) -> None:
        stacks = [Stack.of(layer, max_rank) if max_rank else None for layer in layers]
        width = max(stack.size if stack else 0 for stack in stacks)
        packed = max(layer.packed_bytes // layer.num_experts for layer in layers)
        self._lane = lane
        self.residents = Residents(lane, budget * packed // (packed + 2 * places * width), layers)
        arena, most = self.residents.arena, max(layer.num_experts for layer in layers)
        new = arena.new_zeros
        self.stacks = new(len(arena), places, width, dtype=torch.bfloat16) if max_rank else None
        self.bytes = self.residents.bytes + (0 if self.stacks is None else self.stacks.nbytes)
        self._tables = new(len(layers), most, dtype=torch.int32).fill_(-1)
        self.heat = new(len(layers), most, dtype=torch.int64)
        self._ranks = new(len(layers), places, len(PROJECTIONS), dtype=torch.int32)
        self._shown: list[dict[int, int]] = [{} for _ in layers]
        self._followed = 0
        self._adapters: dict[int, Mapping[int, ExpertLora]] = {}
        self.layers = [
            self._layer(i, layer, stack) for i, (layer, stack) in enumerate(zip(layers, stacks, strict=True))
        ]

    def _layer(self, number: int, layer: ExpertLayer, stack: Stack | None) -> HotLayer:
        arena, experts = self.residents.arena, layer.num_experts
        places = [block.data_ptr() - arena.data_ptr() for block in self.residents.blocks(layer)]
        slices = [(part, arena.view(-1)[at:]) for part, at in zip(layer.slices(), places, strict=True)]
        tables = self._tables[number, :experts], self.heat[number, :experts]
        return HotLayer(layer, slices, arena.shape[1], *tables, stack, self.stacks, self._ranks[number])

    def start(self, expert_tokens: Mapping[ExpertLayer, Sequence[float]]) -> None:
        """Copy the experts with the most tokens to the device, and wait until they are there."""
        self.residents.start(expert_tokens)
        self.residents.arrived.synchronize()
        self.follow()

    def adapt(self, allowed: int) -> None:
        """Between two steps: begin to copy the experts with the most tokens, at most so many bytes."""
        self._lane.used.record(self._lane.transfer.compute())
        self.residents.adapt(allowed)
        self.follow()

    def follow(self) -> None:
        """Between two steps: bring the tables up to date. They show a new resident once its bytes have arrived."""
        moved = self.residents.moved
        if moved == self._followed:
            return
        arrived, changed = self.residents.arrived.query(), False
        if arrived:
            self._followed = moved
        for i, hot in enumerate(self.layers):
            now, before = self.residents.slots(hot.layer), self._shown[i]
            shown = {expert: slot for expert, slot in before.items() if now.get(expert) == slot}
            if arrived:
                comers = [expert for expert in now if expert not in shown]
                self._write(i, comers, *self._adapters)
                shown |= {expert: now[expert] for expert in comers}
            changed |= shown != before
            self._shown[i] = shown
        if changed:
            table = torch.full(self._tables.shape, -1, dtype=torch.int32)
            for row, shown in zip(table, self._shown, strict=True):
                for expert, slot in shown.items():
                    row[expert] = slot
            self._tables.copy_(self._pinned(table), non_blocking=True)

    def set_adapter(self, place: int, loras: Mapping[int, ExpertLora]) -> None:
        """Between two steps: change the adapter of a place, by a layer's place among `layers`; none of them is none.

        Captured graphs use it at once.

        Raises:
            ValueError: there is no room for a rank. Nothing has changed.
        """
        ranks = torch.zeros(len(self.layers), len(PROJECTIONS), dtype=torch.int32)
        for i, lora in loras.items():
            hot = self.layers[i]
            room = hot.stack.width if hot.stack else 0
            for name, pair in lora.pairs.items():
                rank = pair.a.shape[1]
                if rank > room:
                    raise ValueError(
                        f"{hot.layer.name}.{name}: the adapter has rank {rank}, residents on the GPU have room for "
                        f"{room}; start the server with a larger max_lora_rank"
                    )
                ranks[i, PROJECTIONS.index(name)] = rank
        self._adapters[place] = loras
        for i, shown in enumerate(self._shown):
            self._write(i, list(shown), place)
        self._ranks[:, place].copy_(self._pinned(ranks), non_blocking=True)

    def _write(self, number: int, experts: Sequence[int], *places: int) -> None:
        """Copy their adapters to the stacks, without more memory of the device. No kernel reads beyond a rank."""
        hot = self.layers[number]
        stack, slots = hot.stack, self.residents.slots(hot.layer)
        if stack is None or self.stacks is None or not experts:
            return
        for place in places:
            lora = self._adapters.get(place, {}).get(number)
            if lora is None:
                continue
            rows = torch.zeros(len(experts), self.stacks.shape[-1], dtype=torch.bfloat16)
            for name, pair in lora.pairs.items():
                inputs, outputs = _sizes(hot.layer, name)
                rank = pair.a.shape[1]
                a = rows[:, stack.a[name] :][:, : stack.width * inputs].view(-1, stack.width, inputs)
                b = rows[:, stack.b[name] :][:, : stack.width * outputs].view(-1, outputs, stack.width)
                a[:, :rank] = pair.a.detach()[list(experts)]
                b[:, :, :rank] = pair.b.detach()[list(experts)].float() * pair.scaling
            for expert, row in zip(experts, self._pinned(rows), strict=True):
                self.stacks[slots[expert], place].copy_(row, non_blocking=True)

    def _pinned(self, values: Tensor) -> Tensor:
        """Values in memory from which the device copies in the order of the current stream, while the host goes on."""
        return values.pin_memory() if device_of(self.residents.arena.device).pin_memory else values
