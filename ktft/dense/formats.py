"""The formats of frozen linear weights outside the routed experts: how many bytes a matrix takes, and where they lie.

`bf16` stands for the dtype that the model has, with rows one after the other. The others are formats of experts
(`ktft.native.packed`): strips of tiles, then the fp32 scales of rows or blocks.
"""

from __future__ import annotations

from ktft.formats import FORMAT_TRAITS
from ktft.native.packed import PACKED_FORMATS, SCALE_BLOCK, TILE_ROWS, PackedMatrix

PLAIN = "bf16"
_STRIP_PAD = 256
"""Bytes behind each strip, as in the native core."""
_COLS = 32


def may_pack(out_features: int, in_features: int) -> bool:
    """Whether a matrix consists of whole tiles, so that it can have any format."""
    return out_features % TILE_ROWS == 0 and in_features % _COLS == 0


def stays(out_features: int, num_experts: int) -> bool:
    """Whether a linear layer within an MoE block is its router, or the gate of its shared experts, which are not
    packed: small, and every later rounding depends on them.
    """
    return out_features in (1, num_experts)


def head_format(format: str) -> str:
    """The format of the output layer: a format that keeps what is released leaves it as it is."""
    return PLAIN if FORMAT_TRAITS[format].released else format


def layout(format: str, out_features: int, in_features: int) -> tuple[PackedMatrix, int]:
    """Where a matrix `[out_features, in_features]` lies in its bytes, and how many there are. Not for `bf16`."""
    form = PACKED_FORMATS[format]
    strip = -(-in_features // form.tile_cols) * form.tile_bytes + _STRIP_PAD
    tiles = out_features // TILE_ROWS * strip
    if form.row_scaled:
        scales = out_features
    elif form.block_scaled:
        scales = -(-out_features // SCALE_BLOCK) * -(-in_features // SCALE_BLOCK)
    else:
        scales = 0
    matrix = PackedMatrix(out_features, in_features, 0, strip, tiles if scales else None, None)
    return matrix, tiles + 4 * scales


def dense_bytes(format: str, out_features: int, in_features: int, value_bytes: int = 2) -> int:
    """Bytes of a matrix in a format. One that cannot be packed keeps its `value_bytes` a weight."""
    if format == PLAIN or not may_pack(out_features, in_features):
        return out_features * in_features * value_bytes
    return layout(format, out_features, in_features)[1]
