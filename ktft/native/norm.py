"""RMS norm on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ktft.native.extension import core
from ktft.native.machine import Runtime

MULTIPLE = 16
"""What a norm's size is a multiple of."""


class HostNorm:
    """RMS norm (arXiv:1910.07467). All is fp32 but for what goes in and comes out, which is rounded once.

    Args:
        weight: bf16 `[size]` in CPU memory; a multiple of `MULTIPLE`.

    Raises:
        ValueError: the weight is something else.
    """

    def __init__(self, runtime: Runtime, weight: Tensor, epsilon: float) -> None:
        right = weight.dim() == 1 and weight.dtype == torch.bfloat16 and weight.device == _CPU
        if not right or len(weight) % MULTIPLE or not len(weight):
            raise ValueError(
                f"a norm's weight is bf16 [size] in CPU memory, of a multiple of {MULTIPLE}, got {weight.dtype} "
                f"{list(weight.shape)} on {weight.device}"
            )
        self._runtime, self._weight = runtime.handle, weight.contiguous()
        self.size = len(weight)
        self.handle = core.Norm(self.size, self._weight.data_ptr(), epsilon)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The norm of `x`, or of `x + residual`, which `residual` then holds.

        Args:
            x: bf16 `[..., size]`.
            residual: contiguous, like `x`.

        Raises:
            ValueError: a shape, a dtype or a stride is wrong.
        """
        right = x.shape[-1:] == (self.size,) and x.dtype == torch.bfloat16 and x.device == _CPU
        if residual is not None:
            like = residual.shape == x.shape and residual.dtype == x.dtype and residual.device == _CPU
            right = right and like and residual.is_contiguous()
        if not right:
            given = [x] if residual is None else [x, residual]
            raise ValueError(
                f"a norm takes bf16 [..., {self.size}] in CPU memory, and a contiguous residual like it, got "
                + " and ".join(f"{each.dtype} {list(each.shape)} {each.stride()} on {each.device}" for each in given)
            )
        x = x.contiguous()
        out, at = torch.empty_like(x), 0 if residual is None else residual.data_ptr()
        self.handle.run(self._runtime, x.data_ptr(), at, x.numel() // self.size, out.data_ptr())
        return out

    def backward(self, x: Tensor, grad: Tensor) -> Tensor:
        """The gradient of `x`, contiguous, from that of its norm without a residual.

        Args:
            x, grad: bf16 `[..., size]`, of one shape.

        Raises:
            ValueError: a shape or a dtype is wrong.
        """
        right = all(each.dtype == torch.bfloat16 and each.device == _CPU for each in (x, grad))
        if not right or x.shape[-1:] != (self.size,) or grad.shape != x.shape:
            raise ValueError(
                f"a norm's backward takes two bf16 [..., {self.size}] of one shape in CPU memory, got "
                + " and ".join(f"{each.dtype} {list(each.shape)} on {each.device}" for each in (x, grad))
            )
        x, grad = x.contiguous(), grad.contiguous()
        out = torch.empty_like(x)
        rows = x.numel() // self.size
        self.handle.run_backward(self._runtime, x.data_ptr(), grad.data_ptr(), rows, out.data_ptr())
        return out


_CPU = torch.device("cpu")
