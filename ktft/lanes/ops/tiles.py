"""Tiles of the packed formats, as csrc/quant/format.h has them."""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS, ROW_BYTES = 16, 64
CODE_BYTES = TILE_ROWS * ROW_BYTES
GROUP = 32
"""Columns that share a scale in the 4-bit formats."""
SCALE_BLOCK = 128
"""Rows and columns of an fp8 scale's block."""
PLACES = 16
"""Of decoded matrices: LoRA ranks and biases take a multiple of so many columns: rows stay aligned, and tensor cores
multiply no less.
"""


@dataclass(frozen=True)
class Tile:
    """16 rows of 64 bytes, then group scales where a format has them.

    Attributes:
        cols: columns of one tile.
        bytes: codes and group scales.
        row_scaled: whether outputs are multiplied by an fp32 scale a row, which decoding leaves out.
        table: of a 4-bit format, what the 16 codes stand for.
    """

    cols: int
    bytes: int
    row_scaled: bool = False
    table: tuple[float, ...] | None = None


def _with_negatives(*magnitudes: float) -> tuple[float, ...]:
    return *magnitudes, *(-m for m in magnitudes)


TILES = {
    "bf16": Tile(32, CODE_BYTES),
    "int8": Tile(64, CODE_BYTES, row_scaled=True),
    "fp8": Tile(64, CODE_BYTES),
    "k4": Tile(128, CODE_BYTES + 4 * TILE_ROWS, True, _with_negatives(6, 18, 31, 45, 60, 77, 98, 127)),
    "int4": Tile(128, CODE_BYTES + 8 * TILE_ROWS, table=tuple(range(-8, 8))),
    "mxfp4": Tile(128, CODE_BYTES + 4 * TILE_ROWS, table=_with_negatives(0, 0.5, 1, 1.5, 2, 3, 4, 6)),
}


# Triton has these too, for its kernels: called from Python they take ten times as long
def cdiv(value: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-value // by)


def power_of_2(value: int) -> int:
    """The smallest one that is not smaller."""
    return 1 << (value - 1).bit_length()
