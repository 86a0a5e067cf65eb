"""Fills a chunk's weights on a device: decodes packed experts, and writes their adapters beside them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ktft.lanes.ops.interface import Operations, operations
from ktft.lanes.ops.weights import ChunkWeights
from ktft.lora import ExpertLora
from ktft.native.packed import PackedSlice


def decode(
    format: str,
    slices: Sequence[PackedSlice],
    blocks: Sequence[Tensor],
    out: ChunkWeights,
    ops: Operations | None = None,
) -> None:
    """Decode packed experts, exactly: bf16 holds what the formats' values are without their rows' scales.

    Args:
        format, slices: the layer's.
        blocks: of each slice uint8 `[G, expert_bytes]` on the device of `out`: these experts' packed bytes.
        out: of G experts.
        ops: by default the best for the device.
    """
    ops = ops or operations(out.down.values.device)
    for part, block in zip(slices, blocks, strict=True):
        for matrix, row, col in ((out.gate_up, part.begin, 0), (out.down, 0, part.begin)):
            packed = [part.matrices[name] for name in matrix.projections]
            ops.decode(format, block, packed, matrix, row, col)


def place(lora: ExpertLora | None, out: ChunkWeights, ops: Operations | None = None) -> None:
    """Write adapters beside the decoded weights, whose scales must be there.

    Args:
        lora: of the G experts, `[G, ...]` on the device of `out`, of the ranks that `out` was made for.
        out: of G experts.
        ops: by default the best for the device.
    """
    ops = ops or operations(out.down.values.device)
    for matrix in (out.gate_up, out.down):
        if (adapters := matrix.adapters(lora)) is not None:
            ops.place(adapters)
