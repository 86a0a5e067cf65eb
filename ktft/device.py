"""The devices that ktft runs on: CUDA GPUs, and the CPU, which can stand in for a GPU.

`device_of` gives the `Device` of a torch device. Another vendor's accelerator is one more class and one more row of
`ACCELERATORS`, because no other file names torch.cuda, and a driver of its own: locking memory and batches of copies
are calls of CUDA's driver, in `ktft.native.cuda`.
"""

from __future__ import annotations

import functools
import os
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ktft import config


class HostStream:
    """A stream of the CPU, where work is done when the call returns. GPUs have torch's streams, with these methods."""

    def wait_stream(self, stream: Any) -> None:
        """Make work that is enqueued here from now on run after the work that `stream` holds now."""

    def synchronize(self) -> None:
        """Wait for all work that is enqueued here."""


class HostEvent:
    """An event of the CPU, which has passed as soon as it is recorded. GPUs have torch's events, with these methods.

    An event can be recorded again and again, and nothing waits for one that was never recorded.
    """

    at = 0.0

    def record(self, stream: Any = None) -> None:
        """Put the event behind the work that `stream`, by default the current one, holds now."""
        self.at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Make work that is enqueued in `stream`, by default the current one, from now on run after the event."""

    def query(self) -> bool:
        """Whether the device has passed the event."""
        return True

    def synchronize(self) -> None:
        """Wait until the device has passed the event."""

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Milliseconds from this event to `end_event`. Both must have been made with timing, and have passed."""
        return (end_event.at - self.at) * 1e3


_HOST_STREAM = HostStream()

OUTSIDE = 600 << 20
"""Bytes of a GPU that a process takes beside what its tensors do: the driver's, the kernels' and those of libraries."""


class Device:
    """The interface to a device, implemented for the CPU; the class of an accelerator overrides every method.

    Names and meanings are those of torch.cuda. Streams and events are `Any` here: see `HostStream` and `HostEvent`.

    Args:
        device: a torch device. Without an index it stands for the device of its type that is current at each call.

    Attributes:
        index: the device's index; None if it was made without one.
        pin_memory: the value of torch's `pin_memory` for host memory that is copied to or from the device.
        runs_triton: whether Triton compiles for the device.
        records_graphs: whether the device supports `record`.
        collectives: torch.distributed's backend for tensors of the device.
    """

    pin_memory = False
    runs_triton = False
    records_graphs = False
    collectives = "gloo"

    def __init__(self, device: torch.device) -> None:
        self.device, self.index = device, device.index
        self._held_to: int | None = None

    @staticmethod
    def prepare() -> None:
        """Set up what must be set up before this process first uses a device of this type, unless the user did."""

    @staticmethod
    def is_available() -> bool:
        """Whether torch can use a device of this type."""
        return True

    @staticmethod
    def device_count() -> int:
        """The number of devices of this type, if `is_available`."""
        return 1

    @staticmethod
    def is_initialized() -> bool:
        """Whether this process has initialized devices of this type, which takes seconds and memory."""
        return True

    def indexed(self) -> torch.device:
        """The device with its index. One that was made without gets the index of the current device."""
        return self.device

    def name(self) -> str:
        """The name of the device's model, for a person."""
        return "cpu"

    def bus_id(self) -> str | None:
        """The PCI address of the device, such as `0000:0f:00.0`; None if it has none."""
        return None

    def reaches(self, other: int) -> bool:
        """Whether the device reads the memory of the one with that index directly."""
        return True

    def collectives_version(self) -> str | None:
        """The version of the library of `collectives`; None if torch has none."""
        return torch.__version__

    def driver_library(self) -> str | None:
        """The library with the functions of CUDA's driver, for `ktft.native.cuda`. It is None for the CPU, whose memory
        ktft copies itself.
        """
        return None

    def has_grouped_mm(self) -> bool:
        """Whether torch has kernels of `torch._grouped_mm` for the device. Without them it waits for the device."""
        return False

    def has_bf16_pairs(self) -> bool:
        """Whether its instructions in PTX multiply and add two bf16 numbers at once."""
        return False

    def new_stream(self) -> Any:
        return HostStream()

    def current_stream(self) -> Any:
        """The stream that torch's operations use now."""
        return _HOST_STREAM

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """A context in which `stream` is the current one."""
        return nullcontext()

    def handle(self, stream: Any) -> int:
        """The raw handle by which the driver knows the stream."""
        return 0

    def event(self, *, timing: bool = False, blocking: bool = False) -> Any:
        """A new event. A thread that waits for it sleeps with `blocking`; without, it spins, which takes a core."""
        return HostEvent()

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """Keep the tensor's memory, once the tensor is freed, from reuse until `stream` has done its work of then."""

    def synchronize(self) -> None:
        """Wait for all streams of the device."""

    def is_current_stream_capturing(self) -> bool:
        """Whether the current stream records its work for a graph instead of running it."""
        return False

    def graph_pool(self) -> Any:
        """Memory for graphs that are never replayed at the same time: one may reuse what another has freed."""
        return None

    def new_graph(self, pool: Any = None) -> Any:
        """A graph, with the methods of `CudaGraph`.

        Raises:
            NotImplementedError: the device records no graphs.
        """
        raise NotImplementedError("the CPU records no graphs")

    def hold_to(self, size: int | None) -> None:
        """From now on, let this process use so many bytes of the device in all; None takes such a limit back. An
        allocation past it raises torch.OutOfMemoryError.
        """
        self._held_to = size

    def total_bytes(self) -> int | None:
        """The bytes that the device has, whoever uses them; None for the CPU."""
        return None

    def free_bytes(self) -> tuple[int, int] | None:
        """The bytes that are free and the bytes in all, within the limit that torch has; None for the CPU, for which
        there is `ktft.system.available_memory`, unless it stands in for a GPU with a limit.
        """
        return None if self._held_to is None else (self._held_to, self._held_to)

    def memory_reserved(self) -> int:
        """Bytes that torch's allocator holds, for present tensors and for reuse by later ones."""
        return 0

    def memory_allocated(self) -> int:
        """Bytes of present tensors."""
        return 0

    def graph_bytes(self) -> int:
        """Bytes that belong to graphs."""
        return 0

    def peak_bytes(self) -> tuple[int, int]:
        """The most bytes that tensors took at once so far, and the bytes that torch could still take then."""
        return 0, 0

    def make_current(self) -> None:
        """Make it the calling thread's current device."""

    def random_state(self) -> Tensor:
        """The state of torch's generator for the device."""
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)


class CudaGraph:
    """Kernels that a GPU gets as one.

    Args:
        stream: in which they are recorded.
        pool: what `Device.graph_pool` gave; None for memory of its own.
    """

    def __init__(self, stream: Any, pool: Any) -> None:
        self._graph, self._stream, self._pool = torch.cuda.CUDAGraph(), stream, pool

    def begin(self) -> None:
        """From now on, record the kernels that this thread launches, instead of running them. Other threads may use the
        device meanwhile.

        Raises:
            RuntimeError: as `end`.
        """
        self._current = torch.cuda.stream(self._stream)
        self._current.__enter__()
        try:
            torch.cuda.current_blas_handle()  # it must not be made while kernels are recorded
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._current.__exit__(None, None, None)
            raise

    def end(self) -> None:
        """The graph is complete.

        Raises:
            RuntimeError: what the thread did cannot be recorded.
        """
        try:
            with warnings.catch_warnings():  # a part of a layer may have no kernels
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                self._graph.capture_end()
        finally:
            self._current.__exit__(None, None, None)

    def replay(self) -> None:
        """Give the kernels to the current stream."""
        self._graph.replay()


class Cuda(Device):
    """A GPU through torch.cuda."""

    pin_memory = True
    runs_triton = True
    records_graphs = True
    collectives = "nccl"

    @staticmethod
    def prepare() -> None:
        """Let torch's pieces of memory grow in place: then a tensor fits wherever enough is free, in one piece or not.
        torch reads this when it first uses CUDA.
        """
        chosen = any(name in os.environ for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
        if torch.cuda.is_available() and not torch.cuda.is_initialized() and not chosen:
            os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"

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

    def bus_id(self) -> str | None:
        found: Any = torch.cuda.get_device_properties(self.index)
        if not hasattr(found, "pci_bus_id"):  # an older torch
            return None
        return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"

    def reaches(self, other: int) -> bool:
        return bool(torch.cuda.can_device_access_peer(self.index or 0, other))

    def collectives_version(self) -> str | None:
        if not torch.distributed.is_nccl_available():
            return None
        return ".".join(map(str, torch.cuda.nccl.version()))

    def driver_library(self) -> str | None:
        return config.cuda_library()

    def has_grouped_mm(self) -> bool:
        return torch.cuda.get_device_capability(self.index)[0] in (9, 10)

    def has_bf16_pairs(self) -> bool:
        return not torch.version.hip and torch.cuda.get_device_capability(self.index) >= (8, 0)

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

    def graph_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def new_graph(self, pool: Any = None) -> CudaGraph:
        return CudaGraph(self._recording_stream, pool)

    @functools.cached_property
    def _recording_stream(self) -> Any:
        return torch.cuda.Stream(self.index)

    def hold_to(self, size: int | None) -> None:
        if size is None and self._held_to is None:  # a limit of the program's own stays
            return
        self._held_to, fraction = size, 1.0
        if size is not None:
            free, total = torch.cuda.mem_get_info(self.index)
            # What the driver holds for this process is not said. Others' tensors may be in this difference, and what
            # is loaded later is not, so it counts within bounds
            outside = min(max(total - free - self.memory_reserved(), OUTSIDE), 2 * OUTSIDE)
            fraction = min(max(size - outside, 0) / total, 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction, self.index)

    def total_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info(self.index)[1])

    def free_bytes(self) -> tuple[int, int] | None:
        free, limit = self._free_and_limit()
        return min(free, max(0, limit - self.memory_reserved())), limit

    def memory_reserved(self) -> int:
        return self._memory("reserved_bytes", "current")

    def memory_allocated(self) -> int:
        return self._memory("allocated_bytes", "current")

    def _memory(self, statistic: str, which: str) -> int:
        # torch's functions for one statistic flatten and sort them all, which takes longer than a step can spare
        found = torch.cuda.memory_stats_as_nested_dict(self.index)  # empty before CUDA is initialized
        return int(found[statistic]["all"][which]) if found else 0

    def graph_bytes(self) -> int:
        own: Any = self.indexed().index
        mine = (each for each in torch.cuda.memory_snapshot() if each["device"] == own)
        return sum(each["total_size"] for each in mine if tuple(each["segment_pool_id"]) != (0, 0))

    def peak_bytes(self) -> tuple[int, int]:
        peak, (free, limit) = self._memory("allocated_bytes", "peak"), self._free_and_limit()
        return peak, max(min(free + self.memory_reserved(), limit) - peak, 0)

    def make_current(self) -> None:
        torch.cuda.set_device(self.indexed())

    def random_state(self) -> Tensor:
        return self._generator.get_state()

    def set_random_state(self, state: Tensor) -> None:
        self._generator.set_state(state)

    @property
    def _generator(self) -> torch.Generator:
        torch.cuda.init()  # it makes the generators
        return torch.cuda.default_generators[self.indexed().index]

    def _free_and_limit(self) -> tuple[int, int]:
        """Bytes that the driver has left, and that torch may hold in all (`set_per_process_memory_fraction`)."""
        free, total = torch.cuda.mem_get_info(self.index)
        return free, min(total, int(torch.cuda.get_per_process_memory_fraction(self.index) * total))


ACCELERATORS: dict[str, type[Device]] = {"cuda": Cuda}
"""torch's name of a device type -> its class. Training uses the first type that is available on a machine."""


@functools.cache
def device_of(device: torch.device) -> Device:
    """The `Device` of a torch device.

    Raises:
        ValueError: the device is neither the CPU nor one of `ACCELERATORS`.
    """
    kinds = {"cpu": Device} | ACCELERATORS
    if device.type not in kinds:
        raise ValueError(f"experts cannot run on {device}; ktft knows devices of the types {', '.join(kinds)}")
    return kinds[device.type](device)


def accelerators() -> list[Device]:
    """All accelerators of this machine that torch can use, in the order of their indices."""
    here = {name: kind.device_count() for name, kind in ACCELERATORS.items() if kind.is_available()}
    return [device_of(torch.device(name, index)) for name, count in here.items() for index in range(count)]


def accelerator() -> Device | None:
    """The current device of the first type that is available; None if torch sees no accelerator."""
    return next((device_of(torch.device(name)) for name, kind in ACCELERATORS.items() if kind.is_available()), None)
