"""The limit on GPU memory that `kt_config.gpu_memory` sets, checked before a model is loaded."""

from __future__ import annotations

import torch

from ktft.config import emulate_gpu
from ktft.device import OUTSIDE, Device, accelerator, device_of
from ktft.model.shortage import shortage
from ktft.system import readable


def hold_gpu_memory(size: int | None, weights: int) -> None:
    """Hold this process to so many bytes of its GPU. None is all of it. Without a GPU there is nothing to hold.

    Args:
        weights: bytes of the weights that will lie on the GPU.

    Raises:
        ValueError: the GPU has less, or the weights need more; the message has both sizes and the cure.
    """
    device = accelerator() or (device_of(torch.device("cpu")) if emulate_gpu() else None)
    if device is None:
        return
    device.prepare()
    if size is not None:
        _check(device, size, weights)
    device.hold_to(size)


def require_gpu_memory(weights: int) -> None:
    """Refuse weights for which the GPU has no room.

    Args:
        weights: bytes of the weights that will lie on the GPU.

    Raises:
        ValueError: less is free; the message has both sizes and the cure.
    """
    device = accelerator()
    if device is None or (free := device.free_bytes()) is None:
        return
    available = free[0] + device.memory_reserved() - device.memory_allocated()
    if weights > available:
        said = shortage("what is not a routed expert", weights, available, f"{device.name()}'s memory")
        raise ValueError(
            f"{said}. Set dense_placement: host in kt_config to keep these weights in host memory, or a smaller "
            "dense_format (k4, int8 or fp8), or end what else uses the GPU (`nvidia-smi` shows it)"
        )


def _check(device: Device, size: int, weights: int) -> None:
    total = device.total_bytes()
    if total is not None and size > total:
        raise ValueError(
            f"gpu_memory is {readable(size)}, but {device.name()} has {readable(total)}; lower it, or leave it out to "
            "use all of the GPU"
        )
    needed = weights + (0 if total is None else OUTSIDE)
    if size < needed:
        raise ValueError(
            f"gpu_memory is {readable(size)}, but the weights outside the routed experts and what CUDA itself takes "
            f"need {readable(needed)} of it, before any training; raise gpu_memory, or set dense_placement: host in "
            "kt_config to keep these weights in host memory"
        )
