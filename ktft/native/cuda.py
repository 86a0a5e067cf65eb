"""Calls CUDA's driver, which is loaded at run time: locks memory in place, and makes batches of asynchronous copies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ktft.device import Device
from ktft.native.extension import core

CudaError: type[RuntimeError] = core.CudaError
"""The driver refused a call. The message has the driver's name and text of the error, the call and the sizes."""


@dataclass(frozen=True)
class Rows:
    """The rows of one matrix that are copied, such as experts' blocks or their LoRA tensors.

    Row i of the matrix is at `matrix + i * matrix_stride`. On the other side the chosen rows lie one after another in a
    batch, `batch_stride` bytes apart, from `batch` on. `matrix` and `batch` are addresses; `bytes`, the size of a row,
    and the strides are in bytes, and a stride of 0 stands for `bytes`. One copy takes the same rows of each matrix.
    """

    matrix: int
    batch: int
    bytes: int
    matrix_stride: int = 0
    batch_stride: int = 0

    @functools.cached_property
    def native(self) -> Any:
        """The core's own description of these rows."""
        strides = (self.matrix_stride or self.bytes, self.batch_stride or self.bytes)
        return core.RowCopy(self.matrix, self.batch, self.bytes, *strides)


class Driver:
    """A process's connection to CUDA's driver. Any thread may use it. Calls release the GIL.

    Args:
        library: the library to open, see `config.cuda_library`.

    Raises:
        CudaError: there is no such library, or no device.
    """

    def __init__(self, library: str) -> None:
        self.handle = core.CudaDriver(library)  # the core's own object

    @property
    def devices(self) -> int:
        """The number of CUDA devices."""
        return int(self.handle.devices)

    def has_words(self, device: int) -> bool:
        """Whether the device's streams can write and read words of host memory.

        Raises:
            CudaError: there is no such device.
        """
        return bool(self.handle.has_words(device))

    def register(self, device: int, address: int, size: int) -> None:
        """Lock host memory in place, so that copies of it are asynchronous and run at full rate.

        Locking a few GB takes a second.

        Raises:
            CudaError: the driver refused, for instance because a part of the memory is registered already.
        """
        self.handle.register_host(device, address, size)

    def unregister(self, device: int, address: int) -> None:
        """Unlock what `register` locked. No copy of it may be in flight.

        Raises:
            CudaError: nothing is registered there.
        """
        self.handle.unregister_host(device, address)

    def copy_to_device(self, device: int, rows: Sequence[int], matrices: Sequence[Rows], stream: int) -> int:
        """Begin copies from the rows of host matrices to batches on the device. Neighbouring rows share one copy.

        Args:
            device: the device's ordinal.
            rows: the numbers of the rows, the same for every matrix.
            stream: the stream's raw handle.

        Returns:
            The number of copies.

        Raises:
            CudaError: the driver refused a copy; those before it are in flight.
        """
        return self._copy(device, core.CopyDirection.to_device, rows, matrices, stream)

    def copy_to_host(self, device: int, rows: Sequence[int], matrices: Sequence[Rows], stream: int) -> int:
        """Begin copies from batches on the device to the rows of host matrices; see `copy_to_device`."""
        return self._copy(device, core.CopyDirection.to_host, rows, matrices, stream)

    def _copy(self, device: int, direction: Any, rows: Sequence[int], matrices: Sequence[Rows], stream: int) -> int:
        return int(self.handle.copy(device, direction, list(rows), [m.native for m in matrices], stream))


@functools.cache
def driver(library: str) -> Driver:
    """The process's driver from this library, opened at first use; see `Driver` for the error."""
    return Driver(library)


def driver_of(device: Device) -> Driver | None:
    """The process's driver for a device; None for the CPU. See `Driver` for the error."""
    library = device.driver_library()
    return None if library is None else driver(library)


def copy_on_host(rows: Sequence[int], matrices: Sequence[Rows], gather: bool, threads: int = 4) -> None:
    """Copy rows within host memory, and return when that is done.

    `gather` copies from matrices to batches; without it the copies go the other way.
    """
    core.copy_on_host(list(rows), [m.native for m in matrices], gather, threads)
