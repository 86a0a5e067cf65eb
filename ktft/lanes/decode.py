"""Some experts' weights, decoded on a device: what the products of a chunk multiply by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lanes.ops import Operations, operations
from ktft.lanes.tiles import TILES
from ktft.lora import ExpertLora
from ktft.native.packed import PackedSlice

PLACES = 16
"""LoRA ranks and biases take a multiple of so many columns: rows stay aligned, and tensor cores multiply no less."""


def split(values: Tensor, high: Tensor, low: Tensor) -> None:
    """Write values as the sum of two bf16 tensors."""
    high.copy_(values)
    torch.sub(values, high, out=low)


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
        gate_up_scale, down_scale: fp32 `[G, 2 I]` and `[G, H]`; None where the format has none.
        places: columns of one part of each adapted projection's B.
        biases: whether there are any.
    """

    gate_up: Tensor
    down: Tensor
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
        scales = (gate_up.new_empty(m.shape[:2], dtype=torch.float32) for m in (gate_up, down))
        gate_up_scale, down_scale = scales if TILES[format].row_scaled else (None, None)
        return cls(gate_up, down, gate_up_scale, down_scale, places, biases)

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
        """Of both tensors."""
        return self.gate_up.nbytes + self.down.nbytes

    def rows_of(self, projection: str) -> Tensor:
        """A projection's matrix, its further columns included."""
        if projection == "down_proj":
            return self.down
        return self.gate_up.unflatten(1, (2, -1))[:, PROJECTIONS.index(projection)]

    def scale_of(self, projection: str) -> Tensor | None:
        """fp32 `[G, outputs]` of a projection, None where the format has none."""
        if projection == "down_proj" or self.gate_up_scale is None:
            return self.down_scale
        return self.gate_up_scale.unflatten(1, (2, -1))[:, PROJECTIONS.index(projection)]

    def places_of(self, projection: str) -> slice:
        """A projection's among the places of one part."""
        begin = self.places.get("gate_proj", 0) if projection == "up_proj" else 0
        return slice(begin, begin + self.places[projection])

    def parts(self, rows: Tensor, projection: str) -> Tensor:
        """What lies in rows of a projection's matrix, or beside its input, at both parts of B: `[..., 2, places]`."""
        width = self.intermediate if projection == "down_proj" else self.hidden
        end = rows.shape[-1] - (PLACES if self.biases else 0)
        return rows[..., width:end].unflatten(-1, (2, -1))

    def place_b(self, lora: ExpertLora) -> None:
        """Write scaling · B into the columns meant for it."""
        end = PLACES if self.biases else 0
        for matrix, cols in ((self.gate_up, self.hidden), (self.down, self.intermediate)):
            matrix[..., cols : matrix.shape[2] - end].zero_()
        for name, pair in lora.pairs.items():
            scale = self.scale_of(name)
            factor = pair.scaling if scale is None else (pair.scaling / scale)[..., None]
            parts = self.parts(self.rows_of(name), name)[..., self.places_of(name)]
            split(pair.b * factor, *parts[..., : pair.b.shape[2]].unbind(-2))

    def place_bias(self, projection: str, begin: int, bias: Tensor) -> None:
        """Write a bias, fp32 `[G, outputs]` of the rows from `begin`, into its columns."""
        at = self.rows_of(projection)[:, begin : begin + bias.shape[1], -PLACES:]
        at.zero_()
        if (scale := self.scale_of(projection)) is not None:
            bias = bias / scale[:, begin : begin + bias.shape[1]]
        split(bias, at[..., 0], at[..., 1])


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
    for part, block in zip(slices, blocks, strict=True):
        for name, matrix in part.matrices.items():
            down = name == "down_proj"
            row, col = (0, part.begin) if down else (part.begin, 0)
            to = out.rows_of(name)[:, row : row + matrix.rows, col : col + matrix.cols]
            ops.decode(format, block, matrix, to)
            if (scale := out.scale_of(name)) is not None and matrix.scales is not None:
                scales = block[:, matrix.scales : matrix.scales + 4 * matrix.rows].view(torch.float32)
                scale[:, row : row + matrix.rows] = scales
            if matrix.bias is not None:
                bias = block[:, matrix.bias : matrix.bias + 4 * matrix.rows].view(torch.float32)
                out.place_bias(name, row, bias)
