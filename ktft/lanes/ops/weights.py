"""What the products of a chunk multiply by: its experts' weights, decoded on a device, with their adapters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lanes.ops.dropout import Dropout
from ktft.lora import ExpertLora, LoraPair
from ktft.native import ExpertLayer
from ktft.native.packed import PACKED_FORMATS, PackedMatrix, PackedSlice

PLACES = 16
"""LoRA ranks and biases take a multiple of this many columns of a decoded matrix, so that rows stay aligned. Tensor
cores multiply at least this many anyway.
"""


@dataclass(frozen=True)
class ChunkMatrix:
    """Projections of G experts that read the same input, in one bf16 matrix each, with what adds to its product as
    further columns.

    For gate and up these are W_gate above W_up, then B_gate and B_up, each beside its own rows, then the biases. B and
    biases are in two parts, as bf16 keeps 8 bits of an fp32 parameter and two of it 16: all high parts of B, then all
    low ones. With [x | A_gate x, A_up x, A_gate x, A_up x | 1 1] one product gives gate and up with everything that
    belongs to them, and the product with their gradients gives dx and the two parts of Bᵀ d gate and Bᵀ d up.

    Formats with row scales are decoded without: bf16 holds their codes' values exactly, and would round the products.
    The scale multiplies outputs in forward, and gradients of outputs before backward's products, as in the native
    layer; B and the biases are divided by it.

    Attributes:
        projections: their names.
        values: bf16 `[G, outputs, inputs + extra]`.
        a: A of the projections, bf16 `[G, 2, places, inputs]` in two parts; None where they have none.
        scale: fp32 `[G, outputs]`; None where the format has none.
        places: columns of one part of each adapted projection's B.
        biases: whether there are any.
    """

    projections: Sequence[str]
    values: Tensor
    a: Tensor | None
    scale: Tensor | None
    places: Mapping[str, int]
    biases: bool

    @functools.cached_property
    def by_projection(self) -> tuple[Tensor, Tensor | None]:
        """`values` and `scale` as `[G, projections, outputs of one, ...]`."""
        cut = len(self.projections), -1
        return self.values.unflatten(1, cut), None if self.scale is None else self.scale.unflatten(1, cut)

    @functools.cached_property
    def inputs(self) -> int:
        """Columns of `values` that are weights."""
        return self.values.shape[2] - 2 * sum(self.places.values()) - PLACES * self.biases

    @functools.cached_property
    def transposed(self) -> Tensor:
        """`values` with inputs before outputs."""
        return self.values.mT

    @functools.cached_property
    def ones(self) -> Tensor | None:
        """What inputs have at a bias's columns; None without biases."""
        return torch.arange(PLACES, device=self.values.device).lt(2).bfloat16() if self.biases else None

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.values, self.a, self.scale) if tensor is not None]

    def changed(self, change: Callable[[Tensor], Tensor]) -> ChunkMatrix:
        """The same with another tensor in place of each."""
        own = {"values": self.values, "a": self.a, "scale": self.scale}
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in own.items() if tensor is not None}
        return replace(self, **changed)

    def adapters(self, lora: ExpertLora | None) -> Adapters | None:
        """The adapters of the projections; None if there are none."""
        if lora is None or self.a is None:
            return None
        names = self.projections
        pairs = tuple(lora.pairs.get(name) for name in names)
        begins = (0, *itertools.accumulate(self.places.get(name, 0) for name in names[:-1]))
        dropouts = tuple(Dropout.of(lora, name) for name in names)
        return Adapters(pairs, begins, dropouts, 1.0 - lora.dropout, self.a, self.values, self.scale)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a matrix's projections, None for one that has none; and `a`, `values` and `scale` of the matrix.

    A place is a column of one part of B, with the row of A that belongs to it. Each projection has places of its own.
    """

    pairs: tuple[LoraPair | None, ...]
    begins: tuple[int, ...]  # each projection's first place
    dropouts: tuple[Dropout | None, ...]  # of each projection's input
    kept: float  # the probability that an element is not dropped
    a: Tensor
    b: Tensor
    scale: Tensor | None

    @property
    def places(self) -> int:
        return self.a.shape[2]

    def masked(self) -> Iterator[tuple[int, int, Dropout | None]]:
        """Ranges of places [begin, end) with the same mask: all places if nothing is dropped, else one projection's."""
        if self.dropouts[0] is None:
            yield 0, self.places, None
            return
        ends = (*self.begins[1:], self.places)
        yield from (part for part in zip(self.begins, ends, self.dropouts, strict=True) if part[0] < part[1])

    @property
    def parameters(self) -> int:
        """The number of parameters of all pairs."""
        return sum(pair.a.numel() + pair.b.numel() for pair in self.pairs if pair is not None)


@dataclass(frozen=True)
class PackedExperts:
    """Where the packed bytes of G experts lie on a device.

    Attributes:
        format, slices: the layer's.
        blocks: of each slice uint8 `[n, expert_bytes]`.
        slots: int32 `[G]`: which row of `held` each expert is, or -1 - its row of `blocks`. By default experts are the
            first rows of `blocks`.
        held: other packed bytes, of each slice like `blocks`.
    """

    format: str
    slices: Sequence[PackedSlice]
    blocks: Sequence[Tensor]
    slots: Tensor | None = None
    held: Sequence[Tensor] = ()

    def parts(self, matrix: ChunkMatrix) -> Iterator[PackedPart]:
        """What each slice has of a matrix."""
        others: Sequence[Tensor | None] = self.held or [None] * len(self.slices)
        split_inputs = PROJECTIONS[-1] in matrix.projections
        for part, block, other in zip(self.slices, self.blocks, others, strict=True):
            row, col = (0, part.begin) if split_inputs else (part.begin, 0)
            packed = [part.matrices[name] for name in matrix.projections]
            yield PackedPart(self.format, block, self.slots, other, packed, row, col)


class PackedPart(NamedTuple):
    """What one slice has of G experts' matrices: M projections, of the same shape and strips, which are part of a
    `ChunkMatrix`'s values from `row` and `col` on. The other attributes are those of `PackedExperts`.
    """

    format: str
    blocks: Tensor
    slots: Tensor | None
    held: Tensor | None
    matrices: Sequence[PackedMatrix]
    row: int
    col: int


@dataclass(frozen=True)
class ChunkWeights:
    """G decoded experts: gate and up, whose outputs lie one above the other, and down. Without gates, up alone.

    Attributes:
        packed: the same experts, if products should read them instead, and find only the further columns decoded.
    """

    gate_up: ChunkMatrix
    down: ChunkMatrix
    packed: PackedExperts | None = None

    @classmethod
    def empty(cls, layer: ExpertLayer, experts: int, lora: ExpertLora | None, device: torch.device) -> ChunkWeights:
        """Memory for so many of the layer's experts, with room for adapters of `lora`'s ranks."""
        pairs = lora.pairs if lora is not None else {}

        def matrix(names: Sequence[str], outputs: int, inputs: int) -> ChunkMatrix:
            places = {name: -(-pairs[name].a.shape[1] // PLACES) * PLACES for name in names if name in pairs}
            total = sum(places.values())
            cols = inputs + 2 * total + (PLACES if layer.biases else 0)
            values = torch.empty(experts, outputs, cols, dtype=torch.bfloat16, device=device)
            a = values.new_empty(experts, 2, total, inputs) if total else None
            scaled = PACKED_FORMATS[layer.format].row_scaled
            scale = values.new_empty(experts, outputs, dtype=torch.float32) if scaled else None
            return ChunkMatrix(names, values, a, scale, places, layer.biases)

        hidden, intermediate = layer.hidden_size, layer.intermediate_size
        *first, last = layer.projections
        gate_up = matrix(first, len(first) * intermediate, hidden)
        return cls(gate_up, matrix([last], hidden, intermediate))

    def changed(self, change: Callable[[Tensor], Tensor]) -> ChunkWeights:
        return replace(self, gate_up=self.gate_up.changed(change), down=self.down.changed(change))
