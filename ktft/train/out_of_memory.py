"""What a training that ran out of GPU memory tells its user: what takes how much, and what to change."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ktft.device import device_of
from ktft.lanes.lanes import Lanes
from ktft.model.experts import decoder_lists
from ktft.model.shortage import GpuUse, out_of_gpu_memory
from ktft.train.step_order import StepOrder

_SAID = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
"""How libraries that do not allocate through torch say that the GPU's memory is used up."""
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def told(
    trainer: Any, order: StepOrder | None, lanes: Lanes | None, error: BaseException, kept: str
) -> torch.OutOfMemoryError | None:
    """The error with a table and a cure, for one that ended a training for lack of GPU memory; None for another one.

    A Trainer with `auto_find_batch_size` begins again by itself, so it gets the error as it is.

    Args:
        order: the order of the run's steps.
        lanes: of its experts.
        kept: which checkpoint is left.
    """
    if not _is_for_memory(error) or trainer.args.auto_find_batch_size:
        return None
    device = device_of(next(trainer.model.parameters()).device)
    free = device.free_bytes()
    said = str(error).partition("\n")[0]
    where = said.partition(". ")[0].partition(": its buffers")[0]
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", said)
    what = f"step {trainer.state.global_step + 1}: {where}" + (f", {asked[1]} more were asked for" if asked else "")
    use = gpu_use(trainer, order, lanes, _allocated(said) or device.memory_allocated())
    return torch.OutOfMemoryError(out_of_gpu_memory(what, use, None if free is None else free[1], kept))


def _is_for_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


def gpu_use(trainer: Any, order: StepOrder | None, lanes: Lanes | None, allocated: int) -> GpuUse:
    """What a training has on its GPU. `allocated` bytes were in use when memory ran out."""
    model, place = trainer.model, next(trainer.model.parameters()).device
    trained = [p for p in model.parameters() if p.requires_grad]
    state = getattr(getattr(trainer.optimizer, "optimizer", trainer.optimizer), "state", None) or {}
    moments = [each for own in state.values() for each in own.values() if isinstance(each, Tensor)]
    lora = _bytes_on(place, [*trained, *(p.grad for p in trained if p.grad is not None), *moments])
    frozen = [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]
    lane = lanes.running.gpu if lanes is not None and lanes.running is not None else None
    layers = order.layers if order is not None else None
    parts = {
        "weights": _bytes_on(place, frozen),
        "lora": lora,
        "recordings": device_of(place).graph_bytes() + (layers.recorder.bytes if layers is not None else 0),
        "residents": lane.residents.bytes if lane is not None and lane.residents is not None else 0,
        "buffers": lane.bytes if lane is not None else 0,
        "waiting": layers.waiting if layers is not None else 0,
        "stored": layers.stored.bytes if layers is not None else 0,
    }
    settings = getattr(model.config, "quantization_config", None)
    return GpuUse(
        **parts,
        working=max(allocated - sum(parts.values()), 0),
        layers=sum(len(model.get_submodule(name)) for name in decoder_lists(model)),
        together=max(map(len, order.groups), default=1) if order is not None else 1,
        batch=trainer.args.per_device_train_batch_size,
        dense_on_host=getattr(settings, "dense_placement", "auto") == "host",
    )


def _bytes_on(place: torch.device, tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors on this device, each memory once."""
    return sum({each.data_ptr(): each.nbytes for each in tensors if each.device == place}.values())


def _allocated(said: str) -> int | None:
    """The bytes of tensors that torch names in its message: some are freed by the time when it is caught."""
    found = re.search(r"Of the allocated memory ([\d.]+) (\w+) is allocated by PyTorch", said)
    return int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else None
