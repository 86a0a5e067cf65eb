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

from ktft import config
from ktft.native import ExpertLayer, cuda
from ktft.native.cuda import CudaError, Rows
from ktft.system import readable

logger = logging.getLogger(__name__)


class Transfer:
    """One device's copies: a stream into it and one out of it. What they copy must lie still until they have passed.

    Args:
        device: `cuda:N` or `cpu`.

    Attributes:
        driver: CUDA's, None on the CPU.
        into, out: the streams.
        locks: the host memory that copies leave from.
        copied_bytes: that went to the device so far.

    Raises:
        CudaError: the driver cannot be opened.
        ValueError: neither CUDA nor the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"experts cannot run on {device}; ktft streams them to CUDA devices only")
        self._module: Any = torch.get_device_module(device)
        self.driver = cuda.driver(config.cuda_library()) if device.type == "cuda" else None
        self.device, self.index = device, device.index or 0
        self.into, self.out = (torch.cuda.Stream(device) if self.driver else self._module.Stream() for _ in range(2))
        self.locks = Locks(self)
        self.copied_bytes = 0

    def event(self) -> Any:
        """One that can be recorded and waited for again and again; nothing waits for one never recorded."""
        return torch.cuda.Event(blocking=True) if self.driver else self._module.Event()  # a spinning host takes a core

    def compute(self) -> Any:
        """The stream that the caller's products run on."""
        return torch.cuda.current_stream(self.device) if self.driver else self._module.current_stream()

    def copy_in(self, rows: Sequence[int], matrices: Sequence[Rows]) -> None:
        """Begin copies of rows of host matrices to the device."""
        self.copied_bytes += len(rows) * sum(m.bytes for m in matrices)
        if self.driver:
            self.driver.copy_to_device(self.index, rows, matrices, self.into.cuda_stream)
        else:
            cuda.copy_on_host(rows, matrices, gather=True, threads=1)

    def copy_out(self, rows: Sequence[int], matrices: Sequence[Rows]) -> None:
        """Begin copies from the device to rows of host matrices."""
        if self.driver:
            self.driver.copy_to_host(self.index, rows, matrices, self.out.cuda_stream)
        else:
            cuda.copy_on_host(rows, matrices, gather=False, threads=1)

    def copy_within(self, rows: Sequence[int], matrices: Sequence[Rows]) -> None:
        """Begin copies of rows of matrices on the device, on the stream of the products."""
        if self.driver:
            self.driver.copy_on_device(self.index, rows, matrices, self.compute().cuda_stream)
        else:
            cuda.copy_on_host(rows, matrices, gather=True, threads=1)

    def keep(self, tensors: Sequence[Tensor], stream: Any) -> None:
        """When they die, their memory is not given to others before `stream` has passed that point."""
        for tensor in tensors if self.driver else ():
            tensor.record_stream(stream)

    def synchronize(self) -> None:
        """Wait for all copies that were begun here, and for nothing else."""
        if self.driver:
            self.into.synchronize()
            self.out.synchronize()

    def free_bytes(self) -> tuple[int, int] | None:
        """Bytes of the device that are free and that there are, as far as torch may take them; None of the CPU.

        torch's own limit, `torch.cuda.set_per_process_memory_fraction`, counts what its allocator has reserved.
        """
        if not self.driver:
            return None
        free, total = torch.cuda.mem_get_info(self.device)
        limit = int(torch.cuda.get_per_process_memory_fraction(self.device) * total)
        return min(free, max(0, limit - torch.cuda.memory_reserved(self.device))), min(total, limit)


class Locks:
    """Host memory that is locked where it lies, each piece once, until its owner dies.

    Args:
        transfer: whose device the memory is for.

    Attributes:
        locked_bytes: now.
        refusals: what the driver said, one line for each reason.
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
        """Lock a CPU tensor's storage, unless torch did; returns whether it is."""
        key = (tensor.data_ptr(), tensor.nbytes)
        held = self._held.get(key)
        if held is None and self._transfer.driver and tensor.is_pinned():
            held = True  # not noted: it may be freed, and other memory take its place
        return self._lock(tensor.untyped_storage(), [key]) if held is None else held

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
    """The process's own for a device (with its index): memory can be locked once only.

    Raises:
        CudaError: the driver cannot be opened.
        ValueError: neither CUDA nor the CPU.
    """
    return Transfer(device)
