"""LoRA of several adapters on a linear layer of an engine's model on a GPU, for CUDA graphs.

Each adapter has a place in memory that was taken at the start, and the device looks up which place a token has.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ktft.device import device_of
from ktft.lanes.ops.interface import by_triton
from ktft.serve.runtime.lora_linear import FEW_ROWS, add_to_rows, stacked
from ktft.serve.runtime.served_adapter import SliceLora, Slot
from ktft.serve.runtime.slots import AB
from ktft.serve.runtime.step_adapters import StepAdapters

RANK_STEP = 16
"""The room for ranks is a multiple of this."""


@dataclass(frozen=True)
class LoraStacks:
    """The adapters of a layer, by place, at addresses that do not change.

    Attributes:
        a: fp32 `[places, parts, width, input_size]`.
        b: fp32 `[places, output_size, width]`; it has the scaling.
        ranks: `[places]` int32: no kernel reads beyond a rank. 0 stands for no adapter.
        slot: the layer's sizes.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    slot: Slot


class LoraOperations(Protocol):
    """One implementation, a module. It never waits for the device, and its shapes depend on no data."""

    def add(self, stacks: LoraStacks, x: Tensor, out: Tensor, of_token: Tensor) -> None:
        """Add to rows of the product, `[T, output_size]`, LoRA of the inputs `[T, input_size]`.

        Args:
            of_token: `[T]` int32: the place of each row's adapter; -1 for none.
        """


@dataclass(frozen=True)
class _Change:
    """What a place holds from now on; no tensors stand for none."""

    number: int
    place: int | None = None
    rank: int = 0
    a: Tensor | None = None
    b: Tensor | None = None


class PlacedLora:
    """B (A x) for every part of a layer's output, by each token's adapter. It is a `SharedSlot`.

    LoRA takes x in fp32, the dtype in which PEFT holds adapters, and its sum with the product is rounded once.

    A call of up to `FEW_ROWS` tokens reads on the device which adapter each has, so CUDA graphs can capture it. With
    more, the rows of each adapter are gathered.

    Args:
        layer: the engine's layer, on its device.
        name: what messages call it.
        slot: its sizes.
        max_rank: the largest rank of an adapter.
        places: how many adapters there may be.
        step: which adapter each token has.
    """

    def __init__(self, layer: nn.Module, name: str, slot: Slot, max_rank: int, places: int, step: StepAdapters) -> None:
        device, width = next(layer.parameters()).device, -(-max_rank // RANK_STEP) * RANK_STEP
        self.name, self.slot, self.step = name, slot, step
        self.stacks = LoraStacks(
            torch.zeros(places, len(slot.parts), width, slot.input_size, dtype=torch.float32, device=device),
            torch.zeros(places, slot.bounds[-1], width, dtype=torch.float32, device=device),
            torch.zeros(places, dtype=torch.int32, device=device),
            slot,
        )
        self._ranks = [0] * places
        self._operations = _operations(device)

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Add to the product `out`, `[..., output_size]`, LoRA of its inputs `x`, `[..., input_size]`."""
        step = self.step
        if not step.mixed:
            return out
        rows, sums = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if len(rows) <= FEW_ROWS:
            assert step.of_token is not None
            self._operations.add(self.stacks, rows, sums, step.of_token[: len(rows)])
            return out
        for number in step.active:
            place = step.places[number]
            rank = self._ranks[place]
            if not rank:
                continue
            a, b = self.stacks.a[place, :, :rank], self.stacks.b[place, :, :rank]
            add_to_rows(self.slot, a, b, step.rows_of(number, len(rows), self.name), rows, sums)
        return out

    def stacked(self, slices: Sequence[SliceLora]) -> AB:
        return stacked(self.slot, slices)

    def joined(self, number: int, tensors: AB) -> _Change:
        a, b = tensors
        rank, parts, width = b.shape[1], len(self.slot.parts), self.stacks.b.shape[2]
        if rank > width:
            raise ValueError(f"{self.name}: the adapter has rank {rank}, there is room for {width}")
        spare = width - rank
        a, b = pad(a.view(parts, rank, -1), (0, 0, 0, spare)), pad(b, (0, spare))
        if device_of(self.stacks.a.device).pin_memory:
            a, b = a.pin_memory(), b.pin_memory()
        return _Change(number, rank=rank, a=a, b=b)

    def parted(self, number: int) -> _Change:
        return _Change(number, self.step.places.get(number))

    def share(self, state: _Change) -> None:
        place = state.place if state.a is None else self.step.places[state.number]
        if place is None:
            return
        for to, tensor in ((self.stacks.a, state.a), (self.stacks.b, state.b)):
            if tensor is not None:
                to[place].copy_(tensor, non_blocking=True)
        self._ranks[place] = state.rank
        self.stacks.ranks[place] = state.rank


def _operations(device: torch.device) -> LoraOperations:
    """Triton's operations on a GPU, if Triton is installed and `KTFT_TRITON` is not 0; otherwise torch's."""
    chosen = "triton_placed_lora" if by_triton(device) else "torch_placed_lora"
    return cast(LoraOperations, importlib.import_module(f"ktft.serve.runtime.{chosen}"))
