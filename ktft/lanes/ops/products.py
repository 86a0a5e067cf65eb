"""Products of rows grouped by expert, on the CPU and on a GPU."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ktft.device import device_of
from ktft.lanes.routes import Piece


@functools.cache
def _is_grouped(device: torch.device) -> bool:
    """Whether torch has kernels for groups on the device. Without them its own loop would wait for the device."""
    return device_of(device).has_grouped_mm()


def grouped(x: Tensor, matrices: Tensor, piece: Piece) -> Tensor:
    """`[n, N]` bf16: each row of x `[n, K]` times the matrix of its expert in `[G, K, N]`, bf16, summed in fp32.

    Rows of x, and either rows or columns of the matrices, must be contiguous and begin at multiples of 16 bytes.
    """
    if _is_grouped(x.device):
        out: Tensor = torch._grouped_mm(x, matrices, offs=piece.ends)
        return out
    out = x.new_empty(x.shape[0], matrices.shape[2])
    for expert, rows in piece.ranges():
        torch.mm(x[rows], matrices[expert], out=out[rows])
    return out
