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


class HostDense:
    """A weight `[out_features, in_features]` that `pack_dense` packed, for products on the CPU.

    Args:
        packed: its bytes.
        shape: of the weight; a multiple of `ROWS` rows and of 32 columns.
        bias: fp32 `[out_features]`.
        activation_bits: 16; or 8, which rounds rows to int8, with a scale for each and 32 columns, if the format has 4
            bits (AVX-512 without BF16: up to 12 rows, AMX: up to 8), or is `int8` on AVX-512 BF16 (more than 12 rows).
            Elsewhere it changes nothing.

    Raises:
        ValueError: a shape, a dtype or the number of bytes is wrong.
    """

    def __init__(
        self,
        runtime: Runtime,
        format: str,
        packed: Tensor,
        shape: tuple[int, int],
        bias: Tensor | None = None,
        activation_bits: int = 16,
    ) -> None:
        self.runtime, self.format, self.shape = runtime, format, shape
        rows = shape[0]
        bytes_right = packed.shape == (core.dense_bytes(format, *shape),)
        self._check("the packed weight", packed, torch.uint8, bytes_right)
        if bias is not None:
            self._check("bias", bias, torch.float32, bias.shape == (rows,))
        self._packed, self._bias = packed.contiguous(), None if bias is None else bias.contiguous()
        bias_at = 0 if self._bias is None else self._bias.data_ptr()
        self.activation_bits = activation_bits
        self.handle = core.DenseWeight(format, *shape, self._packed.data_ptr(), bias_at, activation_bits)

    def product(self, x: Tensor, biased: bool = True) -> Tensor:
        """`x · Wᵀ`, plus the bias if there is one.

        Args:
            x: bf16 `[..., in_features]`.
            biased: whether the bias is added.

        Returns:
            bf16 `[..., out_features]`. Sums are fp32, and rounded once.

        Raises:
            ValueError: a shape or a dtype is wrong.
        """
        rows, cols = self.shape
        self._check("x", x, torch.bfloat16, x.shape[-1:] == (cols,))
        x = x.contiguous()
        out = torch.empty(*x.shape[:-1], rows, dtype=torch.bfloat16, device="cpu")
        self.handle.product(self.runtime.handle, x.data_ptr(), x.numel() // cols, biased, out.data_ptr())
        return out

    def _check(self, name: str, tensor: Tensor, dtype: torch.dtype, right: bool) -> None:
        if not (right and tensor.dtype == dtype and tensor.device.type == "cpu"):
            raise ValueError(
                f"a product with a {self.format} weight {list(self.shape)}: {name} is {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}, which does not fit; {dtype} in CPU memory is needed"
            )
