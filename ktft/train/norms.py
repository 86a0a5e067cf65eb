"""Norms of gradients in CPU memory, a tensor a thread: torch takes one thread for all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from ktft.native import topology

Norm = Callable[[Tensor], Tensor]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(topology()["cores"], 1), "ktft-norms")


def norms(tensors: Sequence[Tensor], norm: Norm) -> list[Tensor]:
    """`norm` of each, of CPU tensors."""
    return list(_pool().map(norm, tensors))


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], most: float) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_`: the same numbers, but gradients that need no clipping are not written.

    Args:
        parameters: whose gradients have together a norm of `most` at most, afterwards.

    Returns:
        The norm before that, on the first gradient's device.
    """
    clipped = [parameter for parameter in parameters if parameter.grad is not None]
    grads = [parameter.grad for parameter in clipped if parameter.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for grad in grads:
        by_device.setdefault(grad.device, []).append(grad)
    found = [
        torch.stack(norms(own, torch.linalg.vector_norm) if device.type == "cpu" else list(torch._foreach_norm(own)))
        for device, own in by_device.items()
    ]
    total: Tensor = torch.linalg.vector_norm(torch.cat([each.to(grads[0].device) for each in found]))
    if not float(most / (total + 1e-6)) >= 1:  # NaN included
        torch.nn.utils.clip_grads_with_norm_(clipped, most, total)
    return total
