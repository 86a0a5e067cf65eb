"""Chooses the deferred experts of each token. Their outputs are added one layer later; they have the lowest weights."""

from __future__ import annotations

import torch
from torch import Tensor


def lowest(top_k_weights: Tensor, count: int) -> Tensor:
    """A mask `[T, k]` of bool with the `count` lowest of each token's routing weights; the first of equal weights."""
    order = top_k_weights.argsort(dim=1, stable=True)[:, :count]
    return torch.zeros_like(top_k_weights, dtype=torch.bool).scatter_(1, order, True)
