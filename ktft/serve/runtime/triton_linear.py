"""Few tokens through a packed linear weight on a GPU, in Triton. See `ktft.serve.runtime.packed_weight.FewTokens`.

A program multiplies 16 rows of the weight, a strip of tiles, by one token. So the weight is read once a token; from the
third token on, decoding it for all of them takes less.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from ktft.lanes.ops.triton_codes import ROWS, constants, views
from ktft.native.packed import PACKED_FORMATS
from ktft.serve.runtime.triton_resident import strip_product

if TYPE_CHECKING:
    from ktft.serve.runtime.packed_weight import PackedWeight

MOST = 2
COLS = 512
WARPS = 8


# What differs from call to call must not need a new kernel: none can be compiled while a graph is captured
@triton.jit(do_not_specialize_on_alignment=("x", "out"))
def _product(
    codes, floats, halves, strip_codes, scales, x, bias, out, rows, cols,
    CODES: tl.constexpr, TABLE: tl.constexpr, UNIT: tl.constexpr, SCALES: tl.constexpr, TILE: tl.constexpr,
    NIBBLES: tl.constexpr, BIASED: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    strip, token = tl.program_id(0), tl.program_id(1)
    y = strip_product(
        codes, floats, halves, 0, 0, 0, strip_codes, scales, 0, strip, x + token * cols, cols,
        CODES, TABLE, UNIT, SCALES, TILE, NIBBLES, True, False, COLS,
    )  # fmt: skip
    row = strip * ROWS + tl.arange(0, ROWS)
    if BIASED:
        y += tl.load(bias + row)
    tl.store(out + token * rows + row, y.to(tl.bfloat16))


def product(weight: PackedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """See `FewTokens`."""
    (rows, cols), matrix, tokens = weight.shape, weight.matrix, len(x)
    codes, floats, halves = views(weight.format, weight.bytes)
    out = x.new_empty(tokens, rows)
    if tokens:
        assert matrix.scales is not None
        _product[(rows // ROWS.value, tokens)](
            codes, floats, halves, matrix.strip_bytes // codes.element_size(), matrix.scales // 4, x.contiguous(),
            bias, out, rows, cols, **constants(weight.format), NIBBLES=bool(PACKED_FORMATS[weight.format].values),
            BIASED=bias is not None, COLS=COLS, num_warps=WARPS,
        )  # fmt: skip
    return out
