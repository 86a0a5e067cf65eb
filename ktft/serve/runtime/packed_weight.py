"""The weight of a linear layer that stays packed on a GPU.

Few tokens, as in decode, are multiplied straight by packed bytes: memory is the limit, and those are a quarter or half
of bf16's. For more tokens rows are decoded to bf16, some at a time, and multiplied by torch.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from ktft.dense.formats import layout
from ktft.lanes.ops.interface import by_triton, operations
from ktft.native.dense import pack_dense
from ktft.native.machine import Runtime
from ktft.native.packed import TILE_ROWS, PackedMatrix

DECODED_BYTES = 64 << 20
"""bf16 bytes of rows that are decoded at a time, so that an output layer's weight is never in memory as a whole."""


class FewTokens(Protocol):
    """What multiplies few tokens: the module `ktft.serve.runtime.triton_linear`."""

    MOST: int
    """Tokens that it takes at most."""

    def product(self, weight: PackedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
        """`[T, rows]` bf16, from x bf16 `[T, cols]`. Sums are fp32, in an order that does not change."""


@dataclass(frozen=True)
class PackedWeight:
    """A weight `[rows, cols]` on a device, with the layer's bias.

    Attributes:
        format: a format whose rows have scales, of `ktft.native.packed.PACKED_FORMATS`.
        bytes: the packed weight, uint8.
        matrix: where it lies in its bytes.
        bias: fp32 `[rows]`, if the layer has one.
    """

    format: str
    bytes: Tensor
    matrix: PackedMatrix
    bias: Tensor | None

    @classmethod
    def of(
        cls, runtime: Runtime, format: str, weight: Tensor, bias: Tensor | None, device: torch.device
    ) -> PackedWeight:
        """Pack a weight `[rows, cols]`, and put it on the device. Raises ValueError as `pack_dense` does."""
        packed = pack_dense(runtime, format, weight.cpu()).to(device)
        matrix, _ = layout(format, *weight.shape)
        made = cls(format, packed, matrix, None if bias is None else bias.float().to(device))
        for tokens in (1, few.MOST + 1) if (few := few_tokens(device)) is not None else ():
            for biased in {False, bias is not None}:  # no kernel can be compiled while a CUDA graph is captured
                made.product(packed.new_zeros(tokens, matrix.cols, dtype=torch.bfloat16), biased)
        return made

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.matrix.rows, self.matrix.cols

    def product(self, x: Tensor, biased: bool) -> Tensor:
        """From inputs `[..., cols]` to `[..., rows]` in their dtype. Inputs are rounded to bf16."""
        rows, bias = x.reshape(-1, x.shape[-1]).to(torch.bfloat16), self.bias if biased else None
        few = few_tokens(x.device)
        multiply = self._decoded if few is None or len(rows) > few.MOST else partial(few.product, self)
        out = multiply(rows, bias)
        return out.view(*x.shape[:-1], self.matrix.rows).to(x.dtype)

    def _decoded(self, x: Tensor, bias: Tensor | None) -> Tensor:
        rows, cols = self.shape
        step = max(DECODED_BYTES // (2 * cols) // TILE_ROWS, 1) * TILE_ROWS
        out = x.new_empty(len(x), rows)
        for first in range(0, rows, step):
            part = self._rows(first, min(step, rows - first))
            weight = x.new_empty(part.rows, cols)
            operations(x.device).decode_matrix(self.format, self.bytes, part, weight)
            some = None if bias is None else bias[first : first + part.rows].to(x.dtype)
            out[:, first : first + part.rows] = linear(x, weight, some)
        return out

    def _rows(self, first: int, count: int) -> PackedMatrix:
        """Where some rows lie, `first` being a multiple of `TILE_ROWS`."""
        assert self.matrix.scales is not None
        tiles = self.matrix.tiles + first // TILE_ROWS * self.matrix.strip_bytes
        return replace(self.matrix, rows=count, tiles=tiles, scales=self.matrix.scales + 4 * first)


def few_tokens(device: torch.device) -> FewTokens | None:
    """What multiplies few tokens on the device; None if all are multiplied by decoded weights."""
    if not by_triton(device):
        return None
    return cast(FewTokens, importlib.import_module("ktft.serve.runtime.triton_linear"))
