"""What a device does to weights and rows besides multiplying them: in torch operations, and in Triton for CUDA."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Protocol, cast

import torch
from torch import Tensor

from ktft import config
from ktft.lanes.dropout import Dropout
from ktft.lanes.routes import Piece
from ktft.native.packed import PackedMatrix
from ktft.swiglu import Swiglu


class Operations(Protocol):
    """One implementation of them, a module.

    n rows of a piece, G experts, P places of a rank, in parts that are added; a scale is fp32 `[G, outputs]`, of
    formats that have one. Activations are bf16 `[n, ...]`, contiguous in their last dimension; sums are fp32, in an
    order that does not change from call to call. Nothing waits for the device.
    """

    def decode(self, format: str, blocks: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
        """out `[G, rows, cols]` = one projection of packed experts, uint8 `[G, expert_bytes]`, without row scales."""

    def gather(self, source: Tensor, piece: Piece, scale: Tensor | None, out: Tensor) -> None:
        """out `[n, H]` = each row's token of source `[T, H]`, which is fp32, fp16 or bf16, times its expert's scale."""

    def low_rank(self, x: Tensor, a: Tensor, piece: Piece, dropout: Dropout | None, out: Tensor) -> None:
        """Both parts of out `[n, 2, P]` = drop(x `[n, N]`) · aᵀ, a `[G, 2, P, N]` that of the row's expert."""

    def add_low_rank(self, low: Tensor, a: Tensor, piece: Piece, dropout: Dropout | None, out: Tensor) -> None:
        """out `[n, N]` += drop(low `[n, 2, P]` · a `[G, 2, P, N]`)."""

    def lora_gradient(
        self,
        low: Tensor,
        wide: Tensor,
        piece: Piece,
        weights: Tensor | None,
        dropout: Dropout | None,
        factor: float,
        scale: Tensor | None,
        out: Tensor,
    ) -> None:
        """out fp32 `[G, r, N]`, with any strides, += factor · (w · low)ᵀ · drop(wide `[n, N]`) / scale by expert.

        r is at most P of low `[n, 1 or 2, P]`, whose further places are left out; w are the rows' routing weights, of
        fp32 `[T, k]` weights, or 1.
        """

    def swiglu(self, gate_up: Tensor, scale: Tensor | None, piece: Piece, swiglu: Swiglu, out: Tensor) -> None:
        """out `[n, I]` = the activation of scale · gate_up `[n, 2 I]`."""

    def swiglu_backward(
        self,
        gate_up: Tensor,
        scale: Tensor | None,
        grad_h: Tensor,
        more: Tensor | None,
        piece: Piece,
        swiglu: Swiglu,
        weights: Tensor,
        h: Tensor,
        grad_weights: Tensor,
    ) -> None:
        """gate_up `[n, 2 I]`, without its scale, becomes scale · its gradient, h `[n, I]` the activation.

        grad_h `[n, I]` is h's gradient without the routing weights `[T, k]`, whose own gradient <grad_h, h>, and the
        first two columns of `more` if given, are added to grad_weights fp32 `[T, k]`.
        """

    def combine(self, y: Tensor, scale: Tensor | None, piece: Piece, weights: Tensor | None, out: Tensor) -> None:
        """out fp32 `[T, N]` += scale · the rows of y `[n, N]` at their tokens, times weights `[T, k]` if given."""


@functools.cache
def has_triton() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def operations(device: torch.device) -> Operations:
    """Triton's on a GPU where Triton is and `KTFT_TRITON` is not 0; torch's otherwise."""
    chosen = "triton_ops" if device.type == "cuda" and config.use_triton() and has_triton() else "torch_ops"
    return cast(Operations, importlib.import_module(f"ktft.lanes.{chosen}"))
