"""Packs linear weights outside the routed experts. `ktft.dense.formats` says where they lie in their bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from ktft.native.encodings import source_arguments
from ktft.native.extension import core
from ktft.native.machine import Runtime


def pack_dense(
    runtime: Runtime,
    format: str,
    weight: Tensor,
    scales: Tensor | None = None,
    *,
    block: tuple[int, int] | None = None,
    zeros: Tensor | None = None,
) -> Tensor:
    """Pack a weight `[out_features, in_features]`, given as to `ExpertLayer.load`, in one of `EXPERT_FORMATS`.

    Codes are kept with their scales if the format has the same blocks. The runtime does not change the bytes.

    Returns:
        The bytes, uint8 in CPU memory.

    Raises:
        ValueError: a shape or dtype is wrong; the sizes are no multiples of 16 and 32; there is NaN or Inf, or a
            negative fp8 scale.
    """
    source, _held = source_arguments(weight, scales, block, zeros, "")
    rows, cols = source[2:4]
    out = torch.empty(core.dense_bytes(format, rows, cols), dtype=torch.uint8, device="cpu")
    core.pack_dense(runtime.handle, format, *source, out.data_ptr())
    return out
