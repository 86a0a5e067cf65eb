"""Where packed experts lie in memory: what a copy of them, or another program's decoder, must know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ktft.config import PROJECTIONS
from ktft.native.extension import core

TILE_ROWS: int = core.TILE_ROWS
ROW_BYTES: int = core.ROW_BYTES
"""Bytes of codes in one row of a tile."""
CODE_BYTES = TILE_ROWS * ROW_BYTES
GROUP: int = core.GROUP
"""Columns that share a scale in the 4-bit formats."""
SCALE_BLOCK: int = core.SCALE_BLOCK
"""Rows and columns of a block that shares a scale in the block-scaled formats."""


@dataclass(frozen=True)
class PackedFormat:
    """How a decoder reads a format's tiles: 16 rows of 64 bytes of codes, and behind them the scales of groups, if any.

    Attributes:
        name: one of `EXPERT_FORMATS`.
        tile_cols: columns of one tile.
        tile_bytes: codes and group scales.
        row_scaled: whether outputs are multiplied by an fp32 scale for each row, which decoding leaves out.
        block_scaled: whether decoding multiplies by an fp32 scale for each block of `SCALE_BLOCK` rows and columns.
        codes: the type of a code by torch's name. `uint8` holds two 4-bit codes, which have a scale for each group; the
            16 bytes of a group hold its first 16 columns in their low halves, the others in their high halves.
        values: what the 16 codes of 4 bits stand for; else empty.
        unit: all `values` are whole multiples of it.
        group_scales: how a group's scale is stored: `bf16`, `integer` (a byte), `power_of_two` (a byte, the exponent
            plus 127); or `none`.
        multipliers: what each of the 256 stored scales stands for, where they are bytes; else empty.
    """

    name: str
    tile_cols: int
    tile_bytes: int
    row_scaled: bool
    block_scaled: bool
    codes: str
    values: tuple[float, ...]
    unit: float
    group_scales: str
    multipliers: tuple[float, ...]

    @property
    def code_dtype(self) -> torch.dtype:
        """Of `codes`."""
        dtype = getattr(torch, self.codes)
        assert isinstance(dtype, torch.dtype)
        return dtype


PACKED_FORMATS = {row["name"]: PackedFormat(**row) for row in core.FORMAT_ROWS}
"""The native core's table of formats, by name."""


@dataclass(frozen=True)
class PackedMatrix:
    """One projection in an expert's block; offsets are bytes from the block's start.

    Attributes:
        rows, cols: `[width, hidden_size]` of gate and up, `[hidden_size, width]` of down.
        tiles: where the first strip of 16 rows begins; docs/dev/architecture.md has the layout.
        strip_bytes: from one strip to the next.
        scales: of the fp32 scales, `[rows]` (int8, k4) or `[ceil(rows / 128), ceil(cols / 128)]` (fp8); None where the
            format has none outside of its tiles.
        bias: of the fp32 bias, `[rows]`; None where there is none. Down's is in the first slice only.
    """

    rows: int
    cols: int
    tiles: int
    strip_bytes: int
    scales: int | None
    bias: int | None


@dataclass(frozen=True)
class PackedSlice:
    """The part of a layer's experts that one NUMA node holds: some columns of the intermediate dimension.

    Attributes:
        address: of expert 0's block; expert e's is `expert_bytes` times e further.
        expert_bytes: of every block.
        begin, width: the columns.
        matrices: by projection.
    """

    address: int
    expert_bytes: int
    begin: int
    width: int
    matrices: dict[str, PackedMatrix]

    @classmethod
    def of(
        cls, address: int, expert_bytes: int, begin: int, width: int, matrices: Sequence[tuple[Any, ...]]
    ) -> PackedSlice:
        """From what the native core tells, where -1 means none."""
        found = {}
        for name, (rows, cols, tiles, strip_bytes, scales, bias) in zip(PROJECTIONS, matrices, strict=True):
            outside = (None if offset < 0 else offset for offset in (scales, bias))
            found[name] = PackedMatrix(rows, cols, tiles, strip_bytes, *outside)
        return cls(address, expert_bytes, begin, width, found)
