"""The choice of experts on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ktft.native.extension import core
from ktft.native.machine import Runtime
from ktft.native.tensors import address


def choose_experts(runtime: Runtime, logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The experts with the largest logits for each token, the largest first; of equal ones the first.

    Args:
        logits: bf16 `[T, num_experts]`.
        renormalize: whether a token's weights add up to 1.

    Returns:
        Weights, fp32 `[T, top_k]`: the chosen experts' part of `softmax(logits)`; and their numbers, int64
        `[T, top_k]`.

    Raises:
        ValueError: the logits are something else, or there are fewer than `top_k` experts.
    """
    if logits.dim() != 2 or logits.dtype != torch.bfloat16:
        raise ValueError(f"a router's logits are bf16 [tokens, experts], got {logits.dtype} {list(logits.shape)}")
    logits = logits.contiguous()
    shape = len(logits), top_k
    chosen, weights = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.float32)
    core.choose_experts(
        runtime.handle,
        address(logits, "a router's logits"),
        *logits.shape,
        top_k,
        renormalize,
        chosen.data_ptr(),
        weights.data_ptr(),
    )
    return weights, chosen
