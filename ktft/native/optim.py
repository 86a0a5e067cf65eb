"""AdamW on CPU tensors and the norms of their gradients. Each is one pass over memory, on a runtime's threads."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ktft.native.extension import DTYPES, core
from ktft.native.machine import Runtime
from ktft.native.tensors import address, check_memory

ADAM_DTYPES = (torch.float32, torch.bfloat16)


def takes(tensor: Tensor) -> bool:
    """Whether `adamw` can update this parameter, which must be dense, contiguous, fp32 or bf16, and on the CPU."""
    return tensor.is_cpu and tensor.layout == torch.strided and tensor.dtype in ADAM_DTYPES and tensor.is_contiguous()


def row_norms(runtime: Runtime, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each row of each tensor `[rows, elements]`, as fp32 `[rows]`; squares are summed in fp64.

    This exists because torch's own threads spin for milliseconds after the same work, and so delay a thread that gives
    work to a GPU at that time.

    Raises:
        ValueError: a tensor is not two-dimensional, or `takes` does not accept it.
    """
    if not tensors:
        return []
    rows = [len(tensor) for tensor in tensors]
    norms = torch.empty(sum(rows), dtype=torch.float32, device="cpu")
    core.row_norms(runtime.handle, [_rows(tensor) for tensor in tensors], norms.data_ptr())
    return list(norms.split(rows))


def row_bits(runtime: Runtime, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The sum over the bits of each row of each tensor `[rows, elements]`, int64 `[rows]`: 0 for zeros.

    Raises:
        ValueError: as `row_norms`.
    """
    if not tensors:
        return []
    found = torch.tensor(core.row_bits(runtime.handle, [_rows(tensor) for tensor in tensors]), device="cpu")
    return list(found.split([len(tensor) for tensor in tensors]))


_NORMS = "_ktft_row_norms"
"""The attribute of a tensor for the norms of its rows, with the version of the tensor that they are of."""


def remember_row_norms(runtime: Runtime, tensors: Sequence[Tensor]) -> None:
    """Take the norms of the rows of each `[rows, ...]` now, for `known_row_norms`."""
    own = [each for each in tensors if takes(each) and each.numel()]
    for each, norms in zip(own, row_norms(runtime, [each.flatten(1) for each in own]), strict=True):
        note_row_norms(each, norms)


def note_row_norms(tensor: Tensor, norms: Tensor) -> None:
    """Remember the norms of a tensor's rows, which somebody else has taken."""
    setattr(tensor, _NORMS, (tensor._version, norms))


def known_row_norms(tensor: Tensor) -> Tensor | None:
    """The norms of the tensor's rows, if they are known and the tensor has not changed since, as far as autograd knows:
    a gradient scaler changes gradients without a sign.
    """
    version, norms = getattr(tensor, _NORMS, (None, None))
    return norms if version == tensor._version else None


def scale(runtime: Runtime, tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply all elements of the tensors in place by `factor`.

    Raises:
        ValueError: `takes` does not accept a tensor.
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
    grad_factor: float = 1.0,
) -> None:
    """One step of `torch.optim.AdamW` in place. The formula is the same; results agree up to the rounding of fp32.

    Results do not depend on the number of threads, and those in fp32 do not depend on the vector ISA. bf16 is computed
    in fp32 and rounded once, as torch does with `fused=True`.

    Args:
        params: parameters that `takes` accepts; the gradient and moments of each have its shape and dtype.
        steps: the number of each parameter's step, including this one: 1 for the first.
        lr, betas, eps, weight_decay: see `torch.optim.AdamW`.
        grad_factor: what gradients are multiplied by before they are used, as `scale` would do.

    Raises:
        ValueError: tensors do not belong together, or `takes` refuses one.
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
        check_memory(param, "a tensor of AdamW")
        addresses = (tensor.data_ptr() for tensor in (grad, param, exp_avg, exp_avg_sq))
        tensors.append(core.AdamTensor(DTYPES[param.dtype], param.numel(), *addresses, scalars[step], grad_factor))
    core.adam(runtime.handle, tensors)
    torch.autograd.graph.increment_version((*params, *exp_avgs, *exp_avg_sqs))
