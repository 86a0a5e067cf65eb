"""Devices, by what torch can do with them: CUDA's, and the CPU, which stands in for one.

`device_of` gives the `Device` of a torch device. Another vendor's accelerator is one more class and one more row of
`ACCELERATORS`: no other file names torch.cuda. What the driver itself is called for, such as locking memory and batches
of copies, is in `ktft.native.cuda`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ktft import config


class HostStream:
    """The CPU's: its work is done when the call returns. Others are torch's own, with these methods."""

    def wait_stream(self, stream: Any) -> None:
        """What is enqueued here from now on runs after what `stream` holds now."""

    def synchronize(self) -> None:
        """Wait for all that is enqueued here."""


class HostEvent:
    """The CPU's: it has passed when it is recorded. Others are torch's own, with these methods.

    An event can be recorded again and again, and nothing waits for one that was never recorded.
    """

    at = 0.0

    def record(self, stream: Any = None) -> None:
        """Put it behind what `stream`, or the current one, holds now."""
        self.at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """What is enqueued in `stream`, or the current one, from now on runs after the event."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        return True

    def synchronize(self) -> None:
        """Wait until the device has passed it."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from here to `end_event`; both were made with timing, and have passed."""
        return (end_event.at - self.at) * 1e3


_HOST_STREAM = HostStream()


class Device:
    """What ktft asks of a device, as the CPU answers it; the class of an accelerator overrides every method.

    Names and meanings are those of torch.cuda. Streams and events are `Any` here: see `HostStream` and `HostEvent`.

    Args:
        device: without an index it stands for the current one of its type, whichever that is at each call.

    Attributes:
        index: of the device; None where it was made without.
        pin_memory: what torch's `pin_memory` should be for host memory that is copied to or from the device.
        runs_triton: whether Triton compiles for it.
        records_graphs: whether it has `record`.
    """

    pin_memory = False
    runs_triton = False
    records_graphs = False

    def __init__(self, device: torch.device) -> None:
        self.device, self.index = device, device.index

    @staticmethod
    def is_available() -> bool:
        """Whether torch can use a device of this type."""
        return True

    @staticmethod
    def device_count() -> int:
        """How many of this type there are, if `is_available`."""
        return 1

    @staticmethod
    def is_initialized() -> bool:
        """Whether this process has begun to use the type, which takes seconds and memory."""
        return True

    def indexed(self) -> torch.device:
        """The device with its index, which is that of the current one if it was made without."""
        return self.device

    def name(self) -> str:
        """The model, for a person."""
        return "cpu"

    def driver_library(self) -> str | None:
        """A library with the functions of CUDA's driver, for `ktft.native.cuda`. The CPU alone needs none: ktft copies
        its memory itself.
        """
        return None

    def has_grouped_mm(self) -> bool:
        """Whether torch has kernels for `torch._grouped_mm` there; else that waits for the device."""
        return False

    def new_stream(self) -> Any:
        """A stream of its own."""
        return HostStream()

    def current_stream(self) -> Any:
        """The stream of torch's operations."""
        return _HOST_STREAM

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A block in which `stream` is the current one."""
        return nullcontext()

    def handle(self, stream: Any) -> int:
        """The stream as the driver takes it."""
        return 0

    def event(self, *, timing: bool = False, blocking: bool = False) -> Any:
        """An event. With `blocking`, a thread that waits for it sleeps; without, it spins, which takes a core."""
        return HostEvent()

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """When the tensor dies, its memory is not given to others before `stream` has done what it holds then."""

    def synchronize(self) -> None:
        """Wait for all streams of the device."""

    def is_current_stream_capturing(self) -> bool:
        """Whether the current stream records what it is given, for a graph, instead of doing it."""
        return False

    def record(self, work: Callable[[], None], stream: Any) -> Any:
        """A graph of the kernels that `work` launches, recorded in `stream`; its `replay()` launches them all. Other
        threads may use the device meanwhile.

        Raises:
            RuntimeError: `work` cannot be recorded.
        """
        raise NotImplementedError("the CPU records no graphs")

    def free_bytes(self) -> tuple[int, int] | None:
        """Bytes that are free and that there are, as far as torch may take them; None of the CPU, for which
        `ktft.system.available_memory` answers.
        """
        return None

    def memory_reserved(self) -> int:
        """Bytes that torch's allocator holds, for tensors and for later ones."""
        return 0

    def peak_bytes(self) -> tuple[int, int]:
        """The most bytes that tensors took at once so far, and what was left for torch to take then."""
        return 0, 0


class Cuda(Device):
    """A GPU through torch.cuda."""

    pin_memory = True
    runs_triton = True
    records_graphs = True

    @staticmethod
    def is_available() -> bool:
        return torch.cuda.is_available()

    @staticmethod
    def device_count() -> int:
        return torch.cuda.device_count()

    @staticmethod
    def is_initialized() -> bool:
        return torch.cuda.is_initialized()

    def indexed(self) -> torch.device:
        return self.device if self.index is not None else torch.device("cuda", torch.cuda.current_device())

    def name(self) -> str:
        return torch.cuda.get_device_name(self.index)

    def driver_library(self) -> str | None:
        return config.cuda_library()

    def has_grouped_mm(self) -> bool:
        return torch.cuda.get_device_capability(self.index)[0] in (9, 10)

    def new_stream(self) -> Any:
        return torch.cuda.Stream(self.index)

    def current_stream(self) -> Any:
        return torch.cuda.current_stream(self.index)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def handle(self, stream: Any) -> int:
        return int(stream.cuda_stream)

    def event(self, *, timing: bool = False, blocking: bool = False) -> Any:
        return torch.cuda.Event(enable_timing=timing, blocking=blocking)

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def is_current_stream_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def record(self, work: Callable[[], None], stream: Any) -> Any:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                work()
            finally:
                graph.capture_end()
        return graph

    def free_bytes(self) -> tuple[int, int] | None:
        free, limit = self._free_and_limit()
        return min(free, max(0, limit - self.memory_reserved())), limit

    def memory_reserved(self) -> int:
        return torch.cuda.memory_reserved(self.index)

    def peak_bytes(self) -> tuple[int, int]:
        peak, (free, limit) = torch.cuda.max_memory_allocated(self.index), self._free_and_limit()
        return peak, max(min(free + self.memory_reserved(), limit) - peak, 0)

    def _free_and_limit(self) -> tuple[int, int]:
        """Bytes that the driver has left, and that torch may hold in all: `set_per_process_memory_fraction` caps it."""
        free, total = torch.cuda.mem_get_info(self.index)
        return free, min(total, int(torch.cuda.get_per_process_memory_fraction(self.index) * total))


ACCELERATORS: dict[str, type[Device]] = {"cuda": Cuda}
"""By torch's name of the type. On a machine with several, the first one that is available is trained on."""


@functools.cache
def device_of(device: torch.device) -> Device:
    """What ktft asks of a torch device.

    Raises:
        ValueError: it is neither the CPU nor one of `ACCELERATORS`.
    """
    kinds = {"cpu": Device} | ACCELERATORS
    if device.type not in kinds:
        raise ValueError(f"experts cannot run on {device}; ktft knows devices of the types {', '.join(kinds)}")
    return kinds[device.type](device)


def accelerators() -> list[Device]:
    """All of this machine that torch can use, by their numbers."""
    here = {name: kind.device_count() for name, kind in ACCELERATORS.items() if kind.is_available()}
    return [device_of(torch.device(name, index)) for name, count in here.items() for index in range(count)]


def accelerator() -> Device | None:
    """The current device of the first type that is available; None where torch sees no accelerator."""
    return next((device_of(torch.device(name)) for name, kind in ACCELERATORS.items() if kind.is_available()), None)
