"""Tensors on their way between a device and host memory, beside what the device computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktft import spans
from ktft.device import ACCELERATORS, device_of


@dataclass(frozen=True)
class Arriving:
    """Host tensors that a device is writing."""

    tensors: list[Tensor]
    event: Any = None

    def wait(self) -> list[Tensor]:
        """The tensors, once they are there. Only the calling thread waits, for their copies alone."""
        if self.event is not None:
            self.event.synchronize()
        return self.tensors


class Crossing:
    """One device's side streams for hidden states, routing and gradients.

    Host tensors are page-locked, from torch's pool of such memory: it grows to what a step needs and is reused, and it
    gives a block away again only when copies of it are done. On the CPU, rows come back uncopied.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._device = device, device_of(device)
        streams = device.type in ACCELERATORS
        self.out, self.into = (self._device.new_stream() if streams else None for _ in range(2))

    def pinned(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that copies to and from the device run beside everything else."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.pin_memory)

    def to_host(self, *tensors: Tensor) -> Arriving:
        """Copies of device tensors, after what was queued on the current stream."""
        if self.out is None:
            return Arriving([tensor.detach().clone() for tensor in tensors])
        self.out.wait_stream(self._device.current_stream())
        found = []
        with self._device.stream(self.out):
            for tensor in tensors:
                source = tensor.detach().contiguous()
                found.append(self.pinned(source.shape, source.dtype).copy_(source, non_blocking=True))
                self._device.record_stream(source, self.out)
            event = self._device.event()
            event.record(self.out)
        return Arriving(found, event)

    def rows_to_host(self, number: int, *tensors: Tensor) -> Arriving:
        """The same for hidden states or gradients of decoder layer `number`, with a span."""
        with spans.device("copy_out", number, self.out, bytes=sum(t.nbytes for t in tensors)):
            return self.to_host(*tensors)

    def rows_to_device(self, number: int, *tensors: Tensor) -> list[Tensor]:
        """Copies of what the CPU lane computed for decoder layer `number`, with a span. They are made at once; what the
        current stream is given next waits for them.
        """
        with spans.device("copy_in", number, self.into, bytes=sum(t.nbytes for t in tensors)):
            if self.into is None:
                return list(tensors)
            current = self._device.current_stream()
            with self._device.stream(self.into):
                found = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
            current.wait_stream(self.into)
            for tensor in found:
                self._device.record_stream(tensor, current)
            return found
