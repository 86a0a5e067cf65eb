"""Describes where packed experts lie in memory, for code that copies or decodes them outside of the native core."""

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
"""Rows, and also columns, of a block that shares a scale in the block-scaled formats."""


@dataclass(frozen=True)
class PackedFormat:
    """How a decoder reads a format's tiles. A tile has 16 rows of 64 bytes of codes, then the groups' scales, if any.

    Attributes:
        name: one of `EXPERT_FORMATS`.
        tile_cols: the columns of one tile.
        tile_bytes: the bytes of one tile, codes and group scales.
        row_scaled: whether outputs are multiplied by an fp32 scale for each row, which decoding leaves out.
        block_scaled: whether decoding multiplies by an fp32 scale for each block of `SCALE_BLOCK` rows and columns.
        codes: torch's name for the type of a code. `uint8` holds two 4-bit codes, which have a scale for each group;
            the 16 bytes of a group hold its first 16 columns in their low halves, the others in their high halves.
        values: the values of the 16 codes of 4 bits; empty for other formats.
        unit: the number of which all `values` are whole multiples.
        group_scales: how a group's scale is stored: `bf16`, `integer` (a byte), `power_of_two` (a byte, the exponent
            plus 127); or `none`.
        multipliers: the values of the 256 possible scales if scales are stored as bytes; else empty.
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
        """The torch dtype that `codes` names."""
        dtype = getattr(torch, self.codes)
        assert isinstance(dtype, torch.dtype)
        return dtype


PACKED_FORMATS = {row["name"]: PackedFormat(**row) for row in core.FORMAT_ROWS}
"""The native core's table of formats, by name."""


@dataclass(frozen=True)
class PackedMatrix:
    """One projection in an expert's block. Offsets are in bytes from the block's start.

    Attributes:
        rows, cols: `[width, hidden_size]` for gate and up, `[hidden_size, width]` for down.
        tiles: the offset of the first strip of 16 rows; docs/dev/architecture.md has the layout.
        strip_bytes: the distance from one strip to the next.
        scales: the offset of the fp32 scales, `[rows]` in row-scaled formats or `[ceil(rows / 128), ceil(cols / 128)]`
            in block-scaled ones; None if the format has no scales outside of its tiles.
        bias: the offset of the fp32 bias, `[rows]`; None if there is none. Only the first slice has down's bias.
    """

    rows: int
    cols: int
    tiles: int
    strip_bytes: int
    scales: int | None
    bias: int | None


@dataclass(frozen=True)
class PackedSlice:
    """The part of a layer's experts that one NUMA node holds: a range of columns of the intermediate dimension.

    Attributes:
        address: the address of expert 0's block; that of expert e is `e * expert_bytes` further.
        expert_bytes: the size of one expert's block.
        begin, width: the first column and the number of columns.
        matrices: the matrices in a block, by projection.
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
        """A slice from the native core's description, in which an offset of -1 means that there is none."""
        found = {}
        for name, (rows, cols, tiles, strip_bytes, scales, bias) in zip(PROJECTIONS, matrices, strict=True):
            if not rows:  # a gate that the experts do not have
                continue
            outside = (None if offset < 0 else offset for offset in (scales, bias))
            found[name] = PackedMatrix(rows, cols, tiles, strip_bytes, *outside)
        return cls(address, expert_bytes, begin, width, found)
