"""What a device does to weights and rows besides multiplying them: by torch operations, or by Triton on CUDA."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ktft import config
from ktft.device import device_of
from ktft.lanes.ops.dropout import Dropout
from ktft.lanes.ops.weights import Adapters, ChunkMatrix, PackedExperts, PackedPart
from ktft.lanes.routes import ChunkBounds, Piece
from ktft.native.packed import PackedMatrix
from ktft.swiglu import Swiglu


class KeptGates(NamedTuple):
    """Gate and up of a call's rows, kept from forward for backward.

    Attributes:
        rows: bf16 `[T * k, 2 I]` or, where experts have no gate, `[T * k, I]`: those of each route.
        address: int64 `[1]` on the device: where `rows` begin. Recorded kernels find them by it, in each call others.
    """

    rows: Tensor
    address: Tensor


class Operations(Protocol):
    """What an implementation, which is a module, must have.

    A piece has n rows of G experts; some at its end may be no rows, and nothing is done for them. A matrix has the
    outputs of M projections side by side (2 for gate and up, else 1) and N inputs; its adapters have P places. A
    scale is fp32 `[G, outputs]`, in formats that have one. Activations are bf16 and contiguous. `[n, N+]` means rows of
    N columns and more: two parts of P places, which are added up, and columns for biases if there are any. Sums are
    fp32, in an order that is the same in every call.
    Nothing waits for the device.
    """

    def decode(self, part: PackedPart, out: ChunkMatrix, values: bool) -> None:
        """The part's values of out `[G, M, rows, cols+]` = M projections of packed experts, without row scales; these
        become its scale. Biases, divided by the scale, become the first two of the last `PLACES` columns, of which the
        others become zero. Unless `values`, scales and biases are all that is written.
        """

    def decode_matrix(self, format: str, packed: Tensor, matrix: PackedMatrix, out: Tensor) -> None:
        """out `[rows, cols]`, in any floating dtype, = the values of one packed matrix, uint8, with all its scales."""

    def reads_packed(self, format: str, rows_each: float) -> bool:
        """Whether `outputs` and `input_grads` are faster than products of decoded weights, where an expert has so many
        rows on average.
        """

    def outputs(self, x: Tensor, matrix: ChunkMatrix, packed: PackedExperts, piece: Piece) -> Tensor:
        """`[n, outputs]`: each row of x `[n, N+]` times the matrix of its expert, which is read where it is packed, and
        of `matrix` its columns from N on alone.
        """

    def input_grads(self, dy: Tensor, matrix: ChunkMatrix, packed: PackedExperts, piece: Piece) -> Tensor:
        """`[n, N+]`: each row of dy `[n, outputs]` times the transposed matrix of its expert, read as in `outputs`."""

    def place(self, adapters: Adapters) -> None:
        """The a of `adapters` = A / kept, in a high and a low part; its b from column N on = scaling · B / scale
        likewise, with P columns a part. Places beyond a rank become zero, and so does B beside the rows of other
        projections.
        """

    def gather(self, source: Tensor, piece: Piece, scale: Tensor | None, out: Tensor) -> None:
        """out `[n, H+]` = each row's token of source `[T, H]`, fp32, fp16 or bf16, times its expert's scale."""

    def low_rank(self, rows: Tensor, a: Tensor, piece: Piece, begin: int, end: int, dropout: Dropout | None) -> None:
        """Both parts of the places [begin, end) of rows `[n, N+]` = drop(their N columns) · aᵀ, where a is that of the
        row's expert in `[G, 2, P, N]`.
        """

    def add_low_rank(
        self, rows: Tensor, a: Tensor, piece: Piece, begin: int, end: int, dropout: Dropout | None
    ) -> None:
        """N columns of rows `[n, N+]` += drop(both parts of their places [begin, end) · a `[G, 2, P, N]`)."""

    def lora_gradients(
        self,
        adapters: Adapters,
        x: Tensor,
        dx: Tensor,
        dy: Tensor,
        piece: Piece,
        weights: Tensor | None,
        out: Tensor,
        adds: bool,
    ) -> None:
        """out fp32 = or, if `adds`, += the gradients of a and b of each adapter, one after the other, `[G, ...]` each.

        x `[n, N+]` are inputs with A x in the columns behind them; dx `[n, N+]` has Bᵀ dy there; dy `[n, outputs]` are
        the gradients of outputs times their scale. If routing weights fp32 `[T, k]` are given, dy and dx are multiplied
        by those of their rows. A's gradient is dx's places · drop(x) / kept by expert, and zero for an expert without
        rows; B's is scaling · dy · (A x) / scale.
        """

    def swiglu(
        self,
        gate_up: Tensor,
        scale: Tensor | None,
        piece: Piece,
        swiglu: Swiglu,
        out: Tensor,
        kept: KeptGates | None = None,
    ) -> None:
        """out `[n, I+]` = the activation of scale · gate_up `[n, 2 I]`, or `[n, I]` where experts have no gate. `kept`
        receives gate_up.
        """

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
        kept: KeptGates | None = None,
    ) -> None:
        """gate_up, as in `swiglu`, which lacks its scale, becomes scale · its gradient; h `[n, I+]` the activation. If
        `kept` is given, its values are read in place of gate_up's.

        grad_h `[n, I+]` is h's gradient without the routing weights `[T, k]`. Their gradient <grad_h, h> is added to
        grad_weights fp32 `[T, k]`, as are the first two columns of `more` if given.
        """

    def combine(self, y: Tensor, scale: Tensor | None, piece: Piece, weights: Tensor | None, out: Tensor) -> None:
        """out fp32 `[T, N]` += scale · rows of y `[n, N+]` at their tokens, times weights `[T, k]` if given."""

    def sort_routes(
        self,
        index: Tensor,
        factors: Tensor,
        bounds: ChunkBounds,
        piece_rows: int,
        ends: Tensor,
        row_route: Tensor,
        route_row: Tensor,
        told: Tensor,
    ) -> None:
        """Sort the R routes of index, int64 `[T, k]`, by their experts, for each of C chunks in P pieces that have room
        for all routes. Routes to experts that do not exist are left out.

        A row's number counts from its chunk's first row. Of int32 memory, ends `[C, P * E]` begins for each chunk of G
        experts with `[P, G]`: where the rows of each end in each piece of `piece_rows`; row_route `[C, R]` has the
        route of each row, and any route behind the last row; route_row `[C, R]` has the row of each route, R for those
        of other chunks.

        told, int64 `[E + 3]`: each expert's number of rows; the number of an expert that does not exist but has a
        route, 0 if there is none; the sum of expert * factors int64 `[R]`; and -1.
        """

    def find_bad(self, hidden: Tensor, told: Tensor) -> None:
        """The last element of told, which is -1, becomes the number of the first row of hidden `[T, H]` that holds NaN
        or Inf, if there is one.
        """


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def by_triton(device: torch.device) -> bool:
    """Whether all operations on the device are Triton kernels: on a GPU with Triton, unless `KTFT_TRITON` is 0."""
    return device_of(device).runs_triton and config.use_triton() and has_triton()


def operations(device: torch.device) -> Operations:
    """The best implementation for the device."""
    chosen = "triton_ops" if by_triton(device) else "torch_ops"
    return cast(Operations, importlib.import_module(f"ktft.lanes.ops.{chosen}"))
