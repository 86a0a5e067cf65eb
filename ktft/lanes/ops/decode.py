"""Some experts' weights, decoded on a device, with their adapters: what the products of a chunk multiply by."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lanes.ops.chunk_adapters import Adapters
from ktft.lanes.ops.interface import Operations, operations
from ktft.lanes.ops.tiles import PLACES
from ktft.lora import ExpertLora
from ktft.native.packed import PACKED_FORMATS, PackedSlice


@dataclass(frozen=True)
class ChunkWeights:
    """G decoded experts in bf16, each matrix with what adds to its product as further columns.

    `gate_up` is `[G, 2 I, H + extra]`: W_gate above W_up, then B_gate and B_up, each beside its own rows, then the
    biases. These are in two parts, as bf16 keeps 8 bits of an fp32 parameter and two of it 16: all high parts of B,
    then all low ones. With [x | A_gate x, A_up x, A_gate x, A_up x | 1 1] one product gives gate and up with everything
    that belongs to them, and the product with their gradients gives dx and the two parts of Bᵀ d gate and Bᵀ d up.
    `down` is `[G, H, I + extra]` likewise.

    Formats with row scales are decoded without: bf16 holds their codes' values exactly, and would round the products.
    The scale multiplies outputs in forward, and gradients of outputs before backward's products, as in the native
    layer; B and the biases are divided by it.

    Attributes:
        gate_up, down: as above.
        gate_up_a, down_a: A of the projections of that matrix, bf16 `[G, 2, places, inputs]` in two parts; None where
            they have none.
        gate_up_scale, down_scale: fp32 `[G, 2 I]` and `[G, H]`; None where the format has none.
        places: columns of one part of each adapted projection's B.
        biases: whether there are any.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_a: Tensor | None
    down_a: Tensor | None
    gate_up_scale: Tensor | None
    down_scale: Tensor | None
    places: Mapping[str, int]
    biases: bool

    @classmethod
    def empty(
        cls,
        format: str,
        experts: int,
        hidden: int,
        intermediate: int,
        lora: ExpertLora | None,
        biases: bool,
        device: torch.device,
    ) -> ChunkWeights:
        """Memory for `experts` of these sizes, with room for adapters of `lora`'s ranks."""
        pairs = lora.pairs if lora is not None else {}
        places = {name: -(-pairs[name].a.shape[1] // PLACES) * PLACES for name in PROJECTIONS if name in pairs}
        bias = PLACES if biases else 0

        def matrix(rows: int, cols: int, names: Sequence[str]) -> Tensor:
            extra = 2 * sum(places.get(name, 0) for name in names) + bias
            return torch.empty(experts, rows, cols + extra, dtype=torch.bfloat16, device=device)

        gate_up = matrix(2 * intermediate, hidden, PROJECTIONS[:2])
        down = matrix(hidden, intermediate, PROJECTIONS[2:])

        def parts(cols: int, names: Sequence[str]) -> Tensor | None:
            total = sum(places.get(name, 0) for name in names)
            return gate_up.new_empty(experts, 2, total, cols) if total else None

        gate_up_a, down_a = parts(hidden, PROJECTIONS[:2]), parts(intermediate, PROJECTIONS[2:])
        scales = (gate_up.new_empty(m.shape[:2], dtype=torch.float32) for m in (gate_up, down))
        gate_up_scale, down_scale = scales if PACKED_FORMATS[format].row_scaled else (None, None)
        return cls(gate_up, down, gate_up_a, down_a, gate_up_scale, down_scale, places, biases)

    @property
    def hidden(self) -> int:
        """H."""
        return self.down.shape[1]

    @property
    def intermediate(self) -> int:
        """I."""
        return self.gate_up.shape[1] // 2

    @property
    def bytes(self) -> int:
        """Of both matrices."""
        return self.gate_up.nbytes + self.down.nbytes

    @functools.cached_property
    def by_projection(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Gate and up `[G, 2, I, H + extra]` with their scale, and down `[G, 1, H, I + extra]` with its."""

        def stacked(matrix: Tensor, scale: Tensor | None, count: int) -> tuple[Tensor, Tensor | None]:
            cut = (count, matrix.shape[1] // count)
            return matrix.unflatten(1, cut), None if scale is None else scale.unflatten(1, cut)

        return stacked(self.gate_up, self.gate_up_scale, 2), stacked(self.down, self.down_scale, 1)

    def adapters(self, lora: ExpertLora | None) -> tuple[Adapters | None, Adapters | None]:
        """Of gate and up, and of down."""
        return Adapters.of(lora, PROJECTIONS[:2], self.places), Adapters.of(lora, PROJECTIONS[2:], self.places)

    @functools.cached_property
    def ones(self) -> Tensor | None:
        """What inputs have at a bias's columns, None without biases."""
        if not self.biases:
            return None
        return torch.arange(PLACES, device=self.down.device).lt(2).bfloat16()

    @functools.cached_property
    def transposed(self) -> tuple[Tensor, Tensor]:
        """Gate and up, and down, with inputs before outputs."""
        return self.gate_up.mT, self.down.mT


def decode(
    format: str,
    slices: Sequence[PackedSlice],
    blocks: Sequence[Tensor],
    out: ChunkWeights,
    ops: Operations | None = None,
) -> None:
    """Decode packed experts, exactly: bf16 holds what the formats' values are without their rows' scales.

    Args:
        format: the layer's.
        slices: the layer's.
        blocks: of each slice uint8 `[G, expert_bytes]` on the device of `out`: these experts' packed bytes.
        out: of G experts.
        ops: by default the best for the device.
    """
    ops = ops or operations(out.down.device)
    gate_up, down = out.by_projection
    for part, block in zip(slices, blocks, strict=True):
        matrices = [part.matrices[name] for name in PROJECTIONS]
        ops.decode(format, block, matrices[:2], *gate_up, part.begin, 0)
        ops.decode(format, block, matrices[2:], *down, 0, part.begin)


def place(lora: ExpertLora | None, out: ChunkWeights, ops: Operations | None = None) -> None:
    """Write adapters beside the decoded weights: A's two parts, and B's, for which the weights' scales must be there.

    Args:
        lora: of the G experts, `[G, ...]` on the device of `out`, of the ranks that `out` was made for.
        out: of G experts.
        ops: by default the best for the device.
    """
    ops = ops or operations(out.down.device)
    first, second = out.adapters(lora)
    for adapters, scale, a, matrix in (
        (first, out.gate_up_scale, out.gate_up_a, out.gate_up),
        (second, out.down_scale, out.down_a, out.down),
    ):
        if adapters is not None:
            assert a is not None
            ops.place(adapters, scale, a, matrix, a.shape[3])
