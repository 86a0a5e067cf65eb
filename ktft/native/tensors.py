"""Checks tensors for the core, which takes contiguous values in CPU memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
