"""Checks tensors and adapters for the core, which takes contiguous values in CPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora
from ktft.native.extension import DTYPES, NATIVE_PROJECTIONS, core

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_memory(tensor: Tensor, name: str) -> None:
    """Refuse a strided tensor that has no values, such as one on the meta device.

    Raises:
        ValueError: the tensor has no values.
    """
    # A FakeTensor says that it is on the CPU or a GPU; its storage says meta
    if tensor.untyped_storage().device.type == "meta":
        raise ValueError(
            f"{name} {list(tensor.shape)} has no memory: experts are computed from values, which a model on the meta "
            "device or a FakeTensorMode (of torch.compile, say) does not have; run them with real tensors"
        )


def address(tensor: Tensor, name: str) -> int:
    """The address of a tensor's first element.

    Raises:
        ValueError: the tensor is not contiguous, not in CPU memory, or has no memory at all.
    """
    if tensor.layout == torch.strided:
        check_memory(tensor, name)
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{name} must be a contiguous CPU tensor, got {described(tensor)}")
    return tensor.data_ptr()


def described(tensor: Tensor) -> str:
    """Shape, dtype and device, for a message."""
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"


def check_like(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, name: str) -> Tensor:
    """The tensor itself, after a check that it is contiguous, in CPU memory, and of this shape and dtype.

    Raises:
        ValueError: the tensor is something else.
    """
    cpu = tensor.device.type == "cpu" and tensor.layout == torch.strided
    if tuple(tensor.shape) != tuple(shape) or tensor.dtype != dtype or not cpu or not tensor.is_contiguous():
        raise ValueError(f"{name} must be a contiguous CPU tensor {list(shape)} {dtype}, got {described(tensor)}")
    return tensor


def native_lora(
    layer: str,
    num_experts: int,
    lora: ExpertLora | None,
    grads: Sequence[Tensor] | None = None,
    elsewhere: Tensor | None = None,
) -> tuple[Any, list[Tensor]]:
    """The core's view of the adapters, and the tensors it points into.

    Args:
        layer: the layer's name, for messages.
        lora: the adapters; None gives None.
        grads: fp32 tensors into which the gradients are written, for a and b of each projection in the order of
            `PROJECTIONS`.
        elsewhere: `[num_experts]` bool; the gradients of these experts are left as they are.

    Raises:
        ValueError: the core cannot take a shape, dtype or device.
    """
    if lora is None or not lora.pairs:
        return None, []
    if grads is not None:
        _check_gradients(layer, lora.parameters(), grads)
    left = 0
    if elsewhere is not None:
        name = f"{layer}: elsewhere"
        left = address(check_like(elsewhere, (num_experts,), torch.bool, name), name)
    native, tensors = core.Lora(lora.dropout, lora.seed, lora.first_route, left), []
    places = iter([address(grad, "a LoRA gradient") for grad in grads or []])
    for name in PROJECTIONS:
        if (pair := lora.pairs.get(name)) is None:
            continue
        for which, tensor in (("lora_A", pair.a), ("lora_B", pair.b)):
            if tensor.dim() != 3 or tensor.shape[0] != num_experts or tensor.device.type != "cpu":
                raise ValueError(
                    f"{layer}.{name}.{which} must be a CPU tensor with {num_experts} experts in its first "
                    f"dimension, got {list(tensor.shape)} on {tensor.device}"
                )
            if tensor.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"{layer}.{name}.{which} must be fp32 or bf16, got {tensor.dtype}")
        if pair.a.shape[1] != pair.b.shape[2]:
            raise ValueError(f"{layer}.{name}: lora_A has rank {pair.a.shape[1]}, lora_B {pair.b.shape[2]}")
        a, b = pair.a.detach().contiguous(), pair.b.detach().contiguous()
        tensors += [a, b]
        native.add(
            NATIVE_PROJECTIONS[name],
            address(a, f"{layer}.{name}.lora_A"),
            DTYPES[a.dtype],
            address(b, f"{layer}.{name}.lora_B"),
            DTYPES[b.dtype],
            a.shape[1],
            a.shape[2],
            b.shape[1],
            pair.scaling,
            *(next(places) if grads else 0 for _ in range(2)),
        )
    return native, tensors


def _check_gradients(layer: str, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    if len(grads) != len(parameters):
        raise ValueError(f"{layer}: {len(grads)} tensors for the gradients of {len(parameters)} LoRA tensors")
    for parameter, grad in zip(parameters, grads, strict=True):
        check_like(grad, parameter.shape, torch.float32, f"{layer}: the gradient of a LoRA tensor")
