"""AdamW on CPU tensors, and norms of their gradients: one pass over memory, on a runtime's threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ktft.native.extension import DTYPES, core
from ktft.native.machine import Runtime
from ktft.native.tensors import address

ADAM_DTYPES = (torch.float32, torch.bfloat16)


def takes(tensor: Tensor) -> bool:
    """Whether `adamw` updates such a parameter: dense and contiguous, fp32 or bf16, on the CPU."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.dtype in ADAM_DTYPES
        and tensor.is_contiguous()
    )


def row_norms(runtime: Runtime, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Norms `[rows]`, fp32, of each tensor's rows `[rows, elements]`; sums of squares in fp64.

    torch's own threads go on spinning for milliseconds after such work, and hold up whoever gives a GPU its own then.

    Args:
        runtime: threads that compute.
        tensors: what `takes` accepts, two-dimensional.

    Raises:
        ValueError: another tensor.
    """
    if not tensors:
        return []
    norms = core.row_norms(runtime.handle, [_rows(tensor) for tensor in tensors])
    found = torch.tensor(norms, dtype=torch.float32, device="cpu")
    return list(found.split([len(tensor) for tensor in tensors]))


def scale(runtime: Runtime, tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply all elements in place, of what `takes` accepts.

    Raises:
        ValueError: another tensor.
    """
    core.scale(runtime.handle, [_rows(tensor.view(1, -1)) for tensor in tensors], factor)
    torch.autograd.graph.increment_version(tuple(tensors))


def _rows(tensor: Tensor) -> core.RowTensor:
    if not takes(tensor) or tensor.dim() != 2:
        raise ValueError(
            f"norms are of contiguous two-dimensional fp32 or bf16 CPU tensors, got {tensor.dtype} "
            f"{list(tensor.shape)} on {tensor.device}"
        )
    return core.RowTensor(DTYPES[tensor.dtype], *tensor.shape, address(tensor, "a tensor"))


def adamw(
    runtime: Runtime,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of `torch.optim.AdamW` in place: the same formula, to the rounding of fp32.

    Results do not depend on threads, and of fp32 not on the vector ISA. bf16 is computed in fp32 and rounded once, as
    torch's `fused=True` does.

    Args:
        runtime: threads that compute.
        params: what `takes` accepts; each with its gradient and moments, of its shape and dtype.
        steps: of each parameter, this one included: 1 for the first.
        lr, betas, eps, weight_decay: as of `torch.optim.AdamW`.

    Raises:
        ValueError: tensors that do not belong together, or that `takes` refuses.
    """
    beta1, beta2 = betas
    scalars: dict[float, core.AdamStep] = {}
    tensors, keep_alive = [], []
    for param, grad, exp_avg, exp_avg_sq, step in zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True):
        grad = grad.contiguous()
        for name, tensor in (
            ("parameter", param),
            ("gradient", grad),
            ("exp_avg", exp_avg),
            ("exp_avg_sq", exp_avg_sq),
        ):
            if not takes(tensor) or tensor.shape != param.shape or tensor.dtype != param.dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, of a parameter {param.dtype} "
                    f"{list(param.shape)}: AdamW takes contiguous fp32 or bf16 CPU tensors of one shape"
                )
        if step not in scalars:
            scalars[step] = core.AdamStep(
                decay=1 - lr * weight_decay,
                first_weight=1 - beta1,
                beta2=beta2,
                second_weight=1 - beta2,
                root_scale=(1 - beta2**step) ** -0.5,
                eps=eps,
                size=lr / (1 - beta1**step),
            )
        keep_alive.append(grad)
        addresses = (address(tensor, "a tensor of AdamW") for tensor in (grad, param, exp_avg, exp_avg_sq))
        tensors.append(core.AdamTensor(DTYPES[param.dtype], param.numel(), *addresses, scalars[step]))
    core.adam(runtime.handle, tensors)
    torch.autograd.graph.increment_version((*params, *exp_avgs, *exp_avg_sqs))
