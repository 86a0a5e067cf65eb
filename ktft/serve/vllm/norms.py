"""RMSNorm of vLLM on the CPU by vLLM's own kernel.

vLLM has the kernel, but takes it on GPUs only, and on the CPU a chain of torch operations, each of which goes through
memory: 19 times as slow for 256 tokens of 2,048 values. The kernel rounds once, where the chain rounds twice. Built for
AVX2, which vLLM takes on a CPU without AVX-512, it cuts off instead of rounding, so there the chain stays.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor

from ktft import native

PROVIDER = "ktft"
ARGUMENT = "--ir-op-priority", json.dumps({name: [PROVIDER, "native"] for name in ("rms_norm", "fused_add_rms_norm")})
"""The argument of vLLM that prefers what `register` registers."""


def _same_dtype(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return native.cpu_features()["avx512"] and variance_size is None and weight is not None and weight.dtype == x.dtype


def _same_dtypes(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _same_dtype(x, weight, epsilon, variance_size) and x_residual.dtype == x.dtype


def register() -> None:
    """Register the kernel with vLLM, once a process, on a CPU."""
    from vllm import ir

    @ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_same_dtype)
    def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        torch.ops._C.rms_norm(out, x.contiguous(), weight, epsilon)
        return out

    @ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_same_dtypes, inplace=True)
    def fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
        return x, x_residual
