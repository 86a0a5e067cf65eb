"""Packs linear weights outside the routed experts, and multiplies by them on the CPU. `ktft.dense.formats` says where
they lie in their bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktft.native.encodings import source_arguments
from ktft.native.extension import core
from ktft.native.machine import Runtime

ROWS = 32
"""What the number of rows of a weight is a multiple of where it is multiplied packed."""


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


def dense_product(
    runtime: Runtime,
    format: str,
    packed: Tensor,
    shape: tuple[int, int],
    x: Tensor,
    bias: Tensor | None = None,
    activation_bits: int = 16,
) -> Tensor:
    """`x · Wᵀ + bias` on the CPU, for a weight `[out_features, in_features]` that `pack_dense` packed.

    Args:
        packed: its bytes.
        shape: of the weight; a multiple of `ROWS` rows and of 32 columns.
        x: bf16 `[..., in_features]`.
        bias: fp32 `[out_features]`.
        activation_bits: 16; or 8, which rounds rows to int8 (all with AVX-512 BF16, else up to 12), with a scale
            for each and 32 columns, if the format has 4 bits and the ISA no tiles. Elsewhere it changes nothing.

    Returns:
        bf16 `[..., out_features]`. Sums are fp32, and rounded once.

    Raises:
        ValueError: a shape, a dtype or the number of bytes is wrong.
    """
    rows, cols = shape
    for name, tensor, dtype, right in (
        ("x", x, torch.bfloat16, x.shape[-1:] == (cols,)),
        ("the packed weight", packed, torch.uint8, packed.shape == (core.dense_bytes(format, rows, cols),)),
        ("bias", bias, torch.float32, bias is None or bias.shape == (rows,)),
    ):
        if tensor is not None and not (right and tensor.dtype == dtype and tensor.device.type == "cpu"):
            raise ValueError(
                f"a product with a {format} weight {[rows, cols]}: {name} is {tensor.dtype} {list(tensor.shape)} on "
                f"{tensor.device}, which does not fit; {dtype} in CPU memory is needed"
            )
    x, packed, bias = x.contiguous(), packed.contiguous(), None if bias is None else bias.contiguous()
    out = torch.empty(*x.shape[:-1], rows, dtype=torch.bfloat16, device="cpu")
    at = 0 if bias is None else bias.data_ptr()
    tokens = x.numel() // cols
    core.dense_product(
        runtime.handle, format, rows, cols, packed.data_ptr(), at, x.data_ptr(), tokens, activation_bits, out.data_ptr()
    )
    return out
