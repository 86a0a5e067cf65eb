"""Tokens travel to the experts, not experts to the tokens.

Every rank holds some experts of each layer. A call of a layer gathers the hidden states and the routing of all data
parallel ranks; each rank runs its own experts on all tokens; each token's rank gets the sum of what the ranks computed.
Backward is the mirror image. The gradient that reaches the experts is divided by the number of data parallel ranks, as
DDP divides those of all other parameters; the gradient of the hidden states is not.

Tensor parallel ranks have the same tokens, so nothing is gathered from them: they hold other experts, and what these
compute is summed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktft.ranks.group import Ranks, ranks


class Exchange:
    """One call of a layer whose experts are spread over ranks. All ranks must make it, with no tokens if need be.

    Args:
        layer: the layer's number.
        tp_size: the size of a tensor parallel group.

    Raises:
        RuntimeError: the ranks are in different layers, so that they would wait for each other forever; or ranks of a
            tensor parallel group have different numbers of tokens.
    """

    def __init__(self, layer: int, hidden_states: Tensor, tp_size: int = 1) -> None:
        self._ranks: Ranks = ranks(tp_size)
        told = self._ranks.numbers(len(hidden_states), layer)
        self.sizes = [told[rank][0] for rank in self._ranks.data_parallel]
        if any(other != layer for _, other in told):
            where = ", ".join(f"rank {rank} in layer {other}" for rank, (_, other) in enumerate(told))
            raise RuntimeError(
                f"the ranks run different layers ({where}); every process must call the model equally often"
            )
        for first in range(0, len(told), tp_size):
            rows = [rows for rows, _ in told[first : first + tp_size]]
            if min(rows) < max(rows):
                raise RuntimeError(
                    f"ranks {first} to {first + tp_size - 1}, a tensor parallel group, have {rows} tokens; give all of "
                    "a group the same batch, as transformers' Trainer does"
                )

    def gather(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states `[T, H]`, experts and routing weights `[T, k]` of the data parallel ranks' tokens."""
        index = self._ranks.gather_rows(top_k_index, self.sizes)
        hidden, weights = _Gather.apply(self._ranks, self.sizes, hidden_states, top_k_weights)
        return hidden, index, weights

    def scatter(self, out: Tensor, known: Tensor | None = None) -> Tensor:
        """This rank's tokens of the sum over all ranks of `[all tokens, H]`; `known` if all ranks know theirs."""
        own: Tensor = _Scatter.apply(self._ranks, self.sizes, out, known)
        return own


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ranks: Ranks, sizes: list[int], hidden_states: Tensor, top_k_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.ranks, ctx.sizes = ranks, sizes
        return ranks.gather_rows(hidden_states, sizes), ranks.gather_rows(top_k_weights, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        needed = ctx.needs_input_grad[2:]
        own = [
            ctx.ranks.sum_rows(grad, ctx.sizes) * ctx.ranks.dp_size if need else None
            for grad, need in zip(grads, needed, strict=True)
        ]
        return None, None, *own


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, sizes: list[int], out: Tensor, known: Tensor | None) -> Tensor:
        ctx.ranks, ctx.sizes = ranks, sizes
        return ranks.sum_rows(out, sizes) if known is None else known

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, ctx.ranks.gather_rows(grads[0] / ctx.ranks.dp_size, ctx.sizes), None
