"""Sums over a tensor parallel group in a model's graph, and the division of a tensor over such a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktft.ranks.group import Ranks, ranks


@dataclass(frozen=True)
class Shard:
    """How a tensor is divided over the ranks of a tensor parallel group: in equal pieces, the last ones may be shorter.

    Attributes:
        dim: the dimension that is divided.
        size: the size of the whole tensor along it.
        tp_size: the number of ranks.
    """

    dim: int
    size: int
    tp_size: int

    @property
    def sizes(self) -> list[int]:
        """The sizes of the pieces, by rank."""
        piece = -(-self.size // self.tp_size)
        return [max(0, min(piece, self.size - rank * piece)) for rank in range(self.tp_size)]

    def shape(self, own: Tensor) -> list[int]:
        """The shape of the whole tensor."""
        return [self.size if at == self.dim else length for at, length in enumerate(own.shape)]

    def of_this_rank(self, whole: Tensor) -> Tensor:
        """This rank's piece of the whole tensor."""
        return whole.split(self.sizes, self.dim)[self.ranks.tp_rank]

    def gather(self, own: Tensor) -> Tensor:
        """The whole tensor. All ranks must call it."""
        return self.ranks.gather_tensor_parallel(own.detach(), self.sizes, self.dim)

    @property
    def ranks(self) -> Ranks:
        return ranks(self.tp_size)


def summed(tensor: Tensor, tp_size: int) -> Tensor:
    """The sum over a tensor parallel group; each rank's part gets the whole gradient, which all have."""
    total: Tensor = _Sum.apply(tensor, ranks(tp_size))
    return total


def with_summed_gradient(tensor: Tensor, tp_size: int) -> Tensor:
    """The tensor, which all ranks of a tensor parallel group have. Its gradient is the sum of theirs."""
    same: Tensor = _SumGradient.apply(tensor, ranks(tp_size))
    return same


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, together: Ranks) -> Tensor:
        return together.sum_tensor_parallel(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return grads[0], None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, together: Ranks) -> Tensor:
        ctx.together = together
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return ctx.together.sum_tensor_parallel(grads[0]), None
