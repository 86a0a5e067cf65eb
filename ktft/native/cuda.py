"""CUDA's driver without a build against it: memory that is locked in place, and batches of asynchronous copies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ktft.device import Device
from ktft.native.extension import core

CudaError: type[RuntimeError] = core.CudaError
"""What the driver refused, with its own name and text of the error, the call and the sizes."""


@dataclass(frozen=True)
class Rows:
    """Rows of one matrix that travel, with others of the same numbers: experts' blocks, or their LoRA tensors.

    Row i is at `matrix + i * matrix_stride`. The chosen ones lie one after another on the other side, `batch_stride`
    bytes apart from `batch` on. Addresses, and sizes in bytes; a stride of 0 stands for `bytes`.
    """

    matrix: int
    batch: int
    bytes: int
    matrix_stride: int = 0
    batch_stride: int = 0

    @functools.cached_property
    def native(self) -> Any:
        """As the core takes it."""
        strides = (self.matrix_stride or self.bytes, self.batch_stride or self.bytes)
        return core.RowCopy(self.matrix, self.batch, self.bytes, *strides)


class Driver:
    """One process's way to CUDA's driver; any thread may use it. Calls hold no GIL.

    Args:
        library: what to open, as `config.cuda_library` says.

    Raises:
        CudaError: there is no such library, or no device.
    """

    def __init__(self, library: str) -> None:
        self._driver = core.CudaDriver(library)

    @property
    def handle(self) -> Any:
        """As the core takes it."""
        return self._driver

    @property
    def devices(self) -> int:
        """How many there are."""
        return int(self._driver.devices)

    def has_words(self, device: int) -> bool:
        """Whether the device's streams can write and read words of host memory.

        Raises:
            CudaError: there is no such device.
        """
        return bool(self._driver.has_words(device))

    def register(self, device: int, address: int, size: int) -> None:
        """Lock host memory in place, so that copies of it are asynchronous and at full rate: a second for some GB.

        Raises:
            CudaError: the driver refused, for instance since a part of it is registered already.
        """
        self._driver.register_host(device, address, size)

    def unregister(self, device: int, address: int) -> None:
        """Give back what `register` locked. No copy of it may be under way.

        Raises:
            CudaError: nothing is registered there.
        """
        self._driver.unregister_host(device, address)

    def copy_to_device(self, device: int, rows: Sequence[int], matrices: Sequence[Rows], stream: int) -> int:
        """Begin copies from the rows of host matrices to batches on the device, neighbouring rows in one.

        Args:
            device: its ordinal.
            rows: which, the same of every matrix.
            matrices: where from and to.
            stream: raw handle.

        Returns:
            How many copies that made.

        Raises:
            CudaError: the driver refused one; those before it are under way.
        """
        return self._copy(device, core.CopyDirection.to_device, rows, matrices, stream)

    def copy_to_host(self, device: int, rows: Sequence[int], matrices: Sequence[Rows], stream: int) -> int:
        """The way back: from batches on the device to the rows of host matrices."""
        return self._copy(device, core.CopyDirection.to_host, rows, matrices, stream)

    def copy_on_device(self, device: int, rows: Sequence[int], matrices: Sequence[Rows], stream: int) -> int:
        """From the rows of matrices to batches, both on the device."""
        return self._copy(device, core.CopyDirection.on_device, rows, matrices, stream)

    def _copy(self, device: int, direction: Any, rows: Sequence[int], matrices: Sequence[Rows], stream: int) -> int:
        return int(self._driver.copy(device, direction, list(rows), [m.native for m in matrices], stream))


@functools.cache
def driver(library: str) -> Driver:
    """The process's driver of that library, opened at first use.

    Raises:
        CudaError: there is no such library, or no device.
    """
    return Driver(library)


def driver_of(device: Device) -> Driver | None:
    """The process's driver of a device; None of the CPU.

    Raises:
        CudaError: there is no such library, or no device.
    """
    library = device.driver_library()
    return None if library is None else driver(library)


def unavailable(library: str) -> str:
    """Why CUDA cannot be used here, for a person; empty where it can."""
    try:
        driver(library)
    except CudaError as error:
        return str(error)
    return ""


def copy_on_host(rows: Sequence[int], matrices: Sequence[Rows], gather: bool, threads: int = 4) -> None:
    """The same between places in host memory, done when it returns; `gather` copies from matrices to batches."""
    core.copy_on_host(list(rows), [m.native for m in matrices], gather, threads)
