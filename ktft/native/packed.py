"""Where packed experts lie in memory: what a copy of them, or another program's decoder, must know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ktft.config import PROJECTIONS


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
