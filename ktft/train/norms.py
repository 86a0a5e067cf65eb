"""Norms of gradients and clipping by norm. ktft's own threads handle gradients in CPU memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ktft.native import Runtime
from ktft.native.optim import row_norms, scale, takes


def norms(runtime: Runtime, rows: Sequence[Tensor]) -> list[Tensor]:
    """Norms, fp32 `[n]` on the CPU, of the rows of each `[n, elements]` on any device. It waits for a GPU once."""
    native = [takes(each) for each in rows]
    by_kernel = iter(row_norms(runtime, [each for each, own in zip(rows, native, strict=True) if own]))
    others = [each for each, own in zip(rows, native, strict=True) if not own]
    flat = [each[0] for each in others if len(each) == 1]
    of_flat = iter(torch._foreach_norm(flat, dtype=torch.float32) if flat else ())
    by_torch = [
        next(of_flat).view(1) if len(each) == 1 else torch.linalg.vector_norm(each, dim=1, dtype=torch.float32)
        for each in others
    ]
    on_cpu = iter(_to_cpu(by_torch))
    return [next(by_kernel if own else on_cpu) for own in native]


def _to_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, copied once for each device."""
    found = list(tensors)
    for device in {tensor.device for tensor in tensors}:
        places = [at for at, tensor in enumerate(tensors) if tensor.device == device]
        whole = torch.cat([tensors[at] for at in places]).cpu()
        for at, part in zip(places, whole.split([len(tensors[at]) for at in places]), strict=True):
            found[at] = part
    return found


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], most: float, runtime: Runtime) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` to the norm `most`, which does not write gradients that need no clipping.

    Returns the norm before clipping, on the first gradient's device.
    """
    found = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    grads = [grad for _, grad in found]
    if not grads:
        return torch.tensor(0.0)
    total = torch.linalg.vector_norm(torch.cat(norms(runtime, [grad.reshape(1, -1) for grad in grads])))
    factor = float(most / (total + 1e-6))
    if not factor >= 1:  # NaN included
        scale(runtime, [grad for grad in grads if takes(grad)], factor)
        others = [parameter for parameter, grad in found if not takes(grad)]
        torch.nn.utils.clip_grads_with_norm_(others, most, total)
    return total.to(grads[0].device)
