"""Copies between host memory and one device, on streams of their own, and host memory that is locked for them.

The device may be the CPU: streams and events then do nothing, and a copy is done when it returns.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ktft.device import device_of
from ktft.native import ExpertLayer, cuda
from ktft.native.cuda import CudaError, Rows
from ktft.system import readable

logger = logging.getLogger(__name__)


class Transfer:
    """One device's copies: a stream into it and one out of it. What they copy must lie still until they have passed.

    Args:
        device: with its index.

    Attributes:
        driver: the device's, None on the CPU.
        into, out: the streams.
        locks: the host memory that copies leave from.
        copied_bytes: that went to the device so far.

    Raises:
        CudaError: the driver cannot be opened.
        ValueError: `device` is of a type that `ktft.device` does not know.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self.driver = cuda.driver_of(self._device)
        self.device, self.index = device, device.index or 0
        self.into, self.out = (self._device.new_stream() for _ in range(2))
        self.locks = Locks(self)
        self.copied_bytes = 0

    def event(self) -> Any:
        """One that can be recorded and waited for again and again; nothing waits for one never recorded."""
        return self._device.event(blocking=True)

    def compute(self) -> Any:
        """The stream that the caller's products run on."""
        return self._device.current_stream()

    def copy_in(self, rows: Sequence[int], matrices: Sequence[Rows]) -> None:
        """Begin copies of rows of host matrices to the device."""
        self.copied_bytes += len(rows) * sum(m.bytes for m in matrices)
        if self.driver:
            self.driver.copy_to_device(self.index, rows, matrices, self._device.handle(self.into))
        else:
            cuda.copy_on_host(rows, matrices, gather=True, threads=1)

    def copy_out(self, rows: Sequence[int], matrices: Sequence[Rows]) -> None:
        """Begin copies from the device to rows of host matrices."""
        if self.driver:
            self.driver.copy_to_host(self.index, rows, matrices, self._device.handle(self.out))
        else:
            cuda.copy_on_host(rows, matrices, gather=False, threads=1)

    def keep(self, tensors: Sequence[Tensor], stream: Any) -> None:
        """When they die, their memory is not given to others before `stream` has passed that point."""
        for tensor in tensors:
            self._device.record_stream(tensor, stream)

    def synchronize(self) -> None:
        """Wait for all copies that were begun here, and for nothing else."""
        self.into.synchronize()
        self.out.synchronize()


class Locks:
    """Host memory that is locked where it lies for a device's copies, each piece once, until its owner dies.

    `locked_bytes` is its size now; `refusals` is what the driver said, one line for each reason.
    """

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._process = os.getpid()
        self._held: dict[tuple[int, int], bool] = {}
        self._mutex = threading.RLock()  # an owner may die, and be unlocked, while another is locked
        self.locked_bytes = 0
        self.refusals: list[str] = []

    def layer(self, layer: ExpertLayer) -> bool:
        """Lock a layer's packed experts; returns whether all of them are. Takes a second for some GB."""
        return self._lock(layer, [(s.address, s.expert_bytes * layer.num_experts) for s in layer.slices()])

    def tensor(self, tensor: Tensor) -> bool:
        """Lock a CPU tensor's memory, unless torch did; returns whether it is locked."""
        return self.tensors([tensor])

    def tensors(self, tensors: Sequence[Tensor]) -> bool:
        """The same for several."""
        pinned: set[int] = set()  # storages: to ask the driver about each of their tensors takes time
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if (where := storage.data_ptr()) in pinned:
                continue
            key = (tensor.data_ptr(), tensor.nbytes)
            held = self._held.get(key)
            if held is None and self._transfer.driver and tensor.is_pinned():
                pinned.add(where)  # not noted for later: it may be freed, and other memory take its place
            elif not (self._lock(storage, [key]) if held is None else held):
                return False
        return True

    def _lock(self, owner: object, places: list[tuple[int, int]]) -> bool:
        if self._transfer.driver is None:
            return True
        with self._mutex:
            for place in places:
                if place not in self._held:
                    self._held[place] = self._register(*place)
                    weakref.finalize(owner, self._forget, *place).atexit = False
            return all(self._held[place] for place in places)

    def _register(self, address: int, size: int) -> bool:
        assert self._transfer.driver is not None
        try:
            self._transfer.driver.register(self._transfer.index, address, size)
        except CudaError as error:
            self._note(str(error))  # the text alone: the error's frames hold the memory
            return False
        self.locked_bytes += size
        return True

    def _note(self, error: str) -> None:
        reason = error.partition(" failed: ")[2] or error
        if reason not in self.refusals:
            self.refusals.append(reason)
            logger.warning("memory cannot be locked in place, so its copies to the GPU take a detour: %s", error)

    def _forget(self, address: int, size: int) -> None:
        """Before the memory goes: no copy of it may be under way, and the next owner of the place starts anew."""
        if os.getpid() != self._process:
            return  # a forked child: the lock is its parent's, and the mutex may have been held when it was forked
        with self._mutex:
            locked = self._held.pop((address, size), False)
            if not locked:
                return
            assert self._transfer.driver is not None
            self.locked_bytes -= size
            try:
                self._transfer.synchronize()
                self._transfer.driver.unregister(self._transfer.index, address)
            except RuntimeError as error:  # CudaError, or torch's of a context that is broken
                logger.warning("%s of locked memory could not be given back: %s", readable(size), str(error))


@functools.cache
def transfer(device: torch.device) -> Transfer:
    """The process's own for a device, because memory can be locked once only."""
    return Transfer(device)
