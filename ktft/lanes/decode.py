"""Some experts' weights, decoded on a device: what the products of a chunk multiply by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lanes.ops import Operations, operations
from ktft.lora import ExpertLora
from ktft.native.packed import PackedSlice

PLACES = 16
"""LoRA ranks and biases take a multiple of so many columns: rows stay aligned, and tensor cores multiply no less."""


@dataclass(frozen=True)
class ChunkWeights:
    """G decoded experts in bf16, each matrix with what adds to its product as further columns.

    `gate_up` is `[G, 2 I, H + extra]`: W_gate above W_up, then B_gate and B_up, each beside its own rows, then the
    biases in two parts, high and low. With [x | A_gate x | A_up x | 1 1] one product gives gate and up with everything
    that belongs to them, and the product with their gradients gives dx, Bᵀ d gate and Bᵀ d up. `down` is
    `[G, H, I + extra]` likewise.

    Attributes:
        gate_up, down: as above.
        places: columns of each adapted projection's B.
        biases: whether there are any.
    """

    gate_up: Tensor
    down: Tensor
    places: Mapping[str, int]
    biases: bool

    @classmethod
    def empty(
        cls, experts: int, hidden: int, intermediate: int, lora: ExpertLora | None, biases: bool, device: torch.device
    ) -> ChunkWeights:
        """Memory for `experts` of these sizes, with room for the adapters."""
        pairs = lora.pairs if lora is not None else {}
        places = {name: -(-pairs[name].a.shape[1] // PLACES) * PLACES for name in PROJECTIONS if name in pairs}
        bias = PLACES if biases else 0

        def matrix(rows: int, cols: int, names: Sequence[str]) -> Tensor:
            extra = sum(places.get(name, 0) for name in names) + bias
            return torch.empty(experts, rows, cols + extra, dtype=torch.bfloat16, device=device)

        gate_up = matrix(2 * intermediate, hidden, PROJECTIONS[:2])
        return cls(gate_up, matrix(hidden, intermediate, PROJECTIONS[2:]), places, biases)

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

    def first_place(self, projection: str) -> int:
        """The column where a projection's B begins."""
        if projection == "down_proj":
            return self.intermediate
        return self.hidden + (self.places.get("gate_proj", 0) if projection == "up_proj" else 0)

    def place_b(self, lora: ExpertLora) -> None:
        """Write scaling · B into the columns meant for it."""
        for matrix, cols in ((self.gate_up, self.hidden), (self.down, self.intermediate)):
            matrix[..., cols : matrix.shape[2] - (PLACES if self.biases else 0)].zero_()
        for name, pair in lora.pairs.items():
            at = self.first_place(name)
            torch.mul(pair.b, pair.scaling, out=self.rows_of(name)[..., at : at + pair.b.shape[2]])

    def place_bias(self, projection: str, begin: int, bias: Tensor) -> None:
        """Write a bias, fp32 `[G, outputs]` of the rows from `begin`, into its columns."""
        at = self.rows_of(projection)[:, begin : begin + bias.shape[1], -PLACES:]
        at.zero_()
        at[..., 0] = bias
        at[..., 1] = bias - at[..., 0]


def decode(
    format: str,
    slices: Sequence[PackedSlice],
    blocks: Sequence[Tensor],
    out: ChunkWeights,
    ops: Operations | None = None,
) -> None:
    """Decode packed experts: W to bf16, of `int8` and `k4` with its row's scale.

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
            if matrix.bias is not None:
                bias = block[:, matrix.bias : matrix.bias + 4 * matrix.rows].view(torch.float32)
                out.place_bias(name, row, bias)
