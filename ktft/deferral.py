"""Which of a token's experts may be added one layer late: those that weigh least."""

from __future__ import annotations

import torch
from torch import Tensor


def lowest(top_k_weights: Tensor, count: int) -> Tensor:
    """`[T, k]` bool: the `count` lowest of each token's routing weights, of equal ones the first."""
    order = top_k_weights.argsort(dim=1, stable=True)[:, :count]
    return torch.zeros_like(top_k_weights, dtype=torch.bool).scatter_(1, order, True)
