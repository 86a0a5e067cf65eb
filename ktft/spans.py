"""Measures where a training step's time goes, in spans: intervals with a name and a layer, on the host or on a GPU.

A span is measured in two ways. `seconds` is its whole length, no matter how many other spans run at the same time: it
says how long a lane was busy. `waited` is the time that the training thread (the main thread, or the thread that runs
backward for it) spent in the span but not in a span inside of it. The `waited` of all spans and the time outside of
every span add up to the step's time, whatever overlaps.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ktft.device import HostStream, accelerator


class Kind(NamedTuple):
    """A kind of span: the row of a trace in which it is drawn, its label and colour on the report's page, and whether
    such spans may run beside others.
    """

    row: str
    label: str
    colour: str
    parallel: bool = False


KINDS = {
    "attention": Kind("GPU", "attention", "#b36bc4", parallel=True),
    "cpu": Kind("CPU experts", "experts: CPU", "#4c8dd6", parallel=True),
    "stream": Kind("GPU", "experts: streamed", "#e08a3c", parallel=True),
    "resident": Kind("GPU", "experts: resident", "#c9a227", parallel=True),
    "copy_in": Kind("PCIe in", "copies to the GPU", "#3aa6a6", parallel=True),
    "copy_out": Kind("PCIe out", "copies from the GPU", "#a0704a", parallel=True),
    "wait": Kind("waiting", "waiting", "#d65f5f"),
    "optimizer": Kind("optimizer", "optimizer", "#4fa870"),
    "data": Kind("data", "data loading", "#d583b0"),
}
"""The name of a span -> its kind."""
PARALLEL = tuple(name for name, kind in KINDS.items() if kind.parallel)
"""The names of spans that may run at the same time."""
ON_HOST = "torch on the CPU"
"""The row of a GPU's work on a machine without a GPU."""

_FOLDED = 8192  # the number of finished spans that are kept before they are added up, between two calls of `take`


def _kind(name: str) -> Kind:
    if name not in KINDS:
        raise ValueError(f"no span is called {name!r}; names: {', '.join(KINDS)}")
    return KINDS[name]


@dataclass(slots=True)
class Sum:
    """The sums over all spans of one name and layer.

    Attributes:
        seconds: the spans' lengths.
        waited: the part of `seconds` that the training thread spent there.
        expected: the seconds that were predicted for the spans.
        bytes, flops: what the spans moved and computed, by their callers' word.
        count: the number of spans.
    """

    seconds: float = 0.0
    waited: float = 0.0
    expected: float = 0.0
    bytes: float = 0
    flops: float = 0
    count: int = 0

    def add(self, other: Sum) -> None:
        """Add the figures of `other`."""
        self.seconds += other.seconds
        self.waited += other.waited
        self.expected += other.expected
        self.bytes += other.bytes
        self.flops += other.flops
        self.count += other.count


Sums = dict[tuple[str, int | None], Sum]
"""The sums by name and layer; the layer is None for work that belongs to no layer."""


class Interval(NamedTuple):
    """A finished span; `begin` and `end` are seconds of `time.perf_counter`, for spans on a GPU too."""

    name: str
    layer: int | None
    row: str
    begin: float
    end: float
    bytes: float
    flops: float


class Span:
    """A span that its caller begins and ends, by hand or as a context.

    Attributes:
        bytes, flops: what the span moves and computes; both may be set until it ends.
        done: a function that is called with the span's seconds once they are known; it may be set until the span ends.
            A GPU's spans are known at a step's end. Any thread may call the function, and it must not call the
            recorder.
    """

    __slots__ = ("bytes", "done", "flops", "layer", "name", "profiled", "recorder")

    def __init__(self, recorder: Recorder, name: str, layer: int | None, bytes: float, flops: float) -> None:
        self.recorder, self.name, self.layer, self.bytes, self.flops = recorder, name, layer, bytes, flops
        self.done: Callable[[float], None] | None = None
        self.profiled: Any = None

    def begin(self) -> Span:
        """Begin now."""
        return self

    def end(self) -> None:
        """End now."""

    def __enter__(self) -> Span:
        return self.begin()

    def __exit__(self, *_: object) -> None:
        self.end()

    def _profile(self) -> None:
        where = "" if self.layer is None else f" {self.layer}"
        self.profiled = torch.profiler.record_function(f"ktft::{self.name}{where}")
        self.profiled.__enter__()

    def _end_profile(self) -> None:
        self.profiled.__exit__(None, None, None)
        self.profiled = None


class _HostSpan(Span):
    """A span of a thread's own work, measured by the host's clock. Spans that begin inside of it end before it."""

    __slots__ = ("began", "inside", "stack", "thread")

    def begin(self) -> Span:
        if _profiling():
            self._profile()
        self.thread = threading.get_ident()
        stacks = self.recorder.stacks
        stack = stacks.get(self.thread)
        if stack is None:
            stack = stacks[self.thread] = []
        stack.append(self)
        self.stack, self.inside = stack, 0.0
        self.began = time.perf_counter()
        return self

    def end(self) -> None:
        ended = time.perf_counter()
        stack = self.stack
        while stack and stack.pop() is not self:
            pass  # an exception kept this inner span from its end
        seconds = ended - self.began
        if stack:
            stack[-1].inside += seconds
        in_line = self.thread in self.recorder.threads or torch._C._current_graph_task_id() >= 0
        waited = seconds - self.inside if in_line else 0.0
        self.recorder.put((self.name, self.layer, self.began, ended, waited, self.bytes, self.flops, self.done))
        if self.profiled is not None:
            self._end_profile()


class _AsideSpan(Span):
    """A span of work beside a thread's own, measured by the host's clock. Any thread may end it."""

    __slots__ = ("began",)

    def begin(self) -> Span:
        self.began = time.perf_counter()
        return self

    def end(self) -> None:
        ended = time.perf_counter()
        self.recorder.put((self.name, self.layer, self.began, ended, 0.0, self.bytes, self.flops, self.done))


class _DeviceSpan(Span):
    """A span between two events of a stream. No thread waits for the events: they are read once they have passed."""

    __slots__ = ("first", "stream")

    stream: Any

    def begin(self) -> Span:
        if _profiling():
            self._profile()
        self.first = self.recorder.event()
        self.first.record(self.stream)
        return self

    def end(self) -> None:
        last = self.recorder.event()
        last.record(self.stream)
        self.recorder.put_device((self.name, self.layer, self.first, last, self.bytes, self.flops, self.done))
        if self.profiled is not None:
            self._end_profile()


_profiling: Callable[[], bool] = torch.autograd._profiler_enabled


class Recorder:
    """Records the spans of all threads while `on`, and adds them up by name and layer.

    Args:
        event: a function that makes a GPU's event with timing.

    Attributes:
        on: whether spans are recorded. `start` leaves it off; it is on only within training's steps.
        threads: the training thread, and those that it waits for while they work in its place.
        stacks: the open host spans of each thread.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self.on = False
        self.threads = {threading.get_ident()}
        self.stacks: dict[int, list[_HostSpan]] = {}
        self._listener: Callable[[Interval], None] | None = None
        self._new_event = event or _event
        self._events: list[Any] = []  # events for reuse
        self._anchor: tuple[Any, float] | None = None  # an event, and when it passed by the host's clock
        self._done: deque[tuple[Any, ...]] = deque()
        self._pending: deque[tuple[Any, ...]] = deque()
        self._sums: Sums = {}
        self._lock = threading.Lock()
        self._nothing = Span(self, "", None, 0, 0)

    # --- called by code that runs work --------------------------------------------------------------------------------

    def span(self, name: str, layer: int | None = None, *, bytes: float = 0, flops: float = 0) -> Span:
        """A span of the calling thread's own work: `with spans.span("cpu", 3, bytes=..., flops=...):`."""
        if not self.on:
            return self._nothing
        return _HostSpan(self, name, layer, bytes, flops)

    def begin(self, name: str, layer: int | None = None, *, bytes: float = 0, flops: float = 0) -> Span:
        """Begin a span of work that runs by itself, such as work handed to other threads. Pass the result to `end`."""
        if not self.on:
            return self._nothing
        return _AsideSpan(self, name, layer, bytes, flops).begin()

    def end(self, span: Span) -> None:
        """End a span that `begin` returned; any thread may do it."""
        span.end()

    def device(
        self, name: str, layer: int | None = None, stream: Any = None, *, bytes: float = 0, flops: float = 0
    ) -> Span:
        """A span of the work that the block enqueues in a GPU's stream. For None or the CPU's stream it is `span`."""
        if not self.on:
            return self._nothing
        if stream is None or isinstance(stream, HostStream):
            return _HostSpan(self, name, layer, bytes, flops)
        span = _DeviceSpan(self, name, layer, bytes, flops)
        span.stream = stream
        return span

    def add(
        self,
        name: str,
        layer: int | None,
        begin: float,
        end: float,
        *,
        bytes: float = 0,
        flops: float = 0,
        waited: bool = False,
    ) -> None:
        """Record a span that was measured elsewhere, in seconds of `time.perf_counter`.

        `waited` says that the training thread did nothing else during it.
        """
        if self.on:
            self.put((name, layer, begin, end, end - begin if waited else 0.0, bytes, flops, None))

    def expect(self, layer: int | None, seconds: Mapping[str, float]) -> None:
        """Record the predicted seconds of spans, by name, beside the measured ones."""
        if self.on:
            with self._lock:
                for name, predicted in seconds.items():
                    self._sum(name, layer).expected += predicted

    # --- called by training -------------------------------------------------------------------------------------------

    def start(self, listener: Callable[[Interval], None] | None = None) -> None:
        """Begin a run in this thread, with nothing recorded. The listener gets every span when it is added up."""
        self.on, self._listener, self.threads = False, listener, {threading.get_ident()}
        for left in (self._done, self._pending, self._sums, self.stacks):
            left.clear()
        self._anchor = None
        gpu = accelerator()
        if gpu is not None and gpu.is_initialized():
            self._take_anchor()

    def stand_in(self) -> None:
        """The calling thread works in place of the training thread, which waits for it."""
        self.threads.add(threading.get_ident())

    def take(self) -> Sums:
        """The sums since the previous call, at a step's end. Unfinished device spans count in the next call."""
        with self._lock:
            self._fold()
            sums, self._sums = self._sums, {}
        for stack in list(self.stacks.values()):
            stack.clear()
        return sums

    def stop(self, *, wait: bool) -> Sums:
        """End the run, and return the sums since the last `take`. With `wait` this waits for a GPU's open spans."""
        self.on = False
        if wait:
            for _, _, _, last, *_ in self._pending:
                last.synchronize()
        else:
            self._pending.clear()
        sums = self.take()
        self._listener = None
        return sums

    # --- called by spans ----------------------------------------------------------------------------------------------

    def put(self, done: tuple[Any, ...]) -> None:
        """Take a finished span: (name, layer, begin, end, waited, bytes, flops, done)."""
        self._done.append(done)  # append is atomic, so working threads take no lock
        if len(self._done) > _FOLDED:
            with self._lock:
                self._fold()

    def put_device(self, pending: tuple[Any, ...]) -> None:
        """Take a span that may still run: (name, layer, first event, last event, bytes, flops, done)."""
        self._pending.append(pending)
        if len(self._pending) % _FOLDED == 0:
            with self._lock:
                self._fold()

    def event(self) -> Any:
        """An event to record."""
        if self._anchor is None:
            self._take_anchor()
        try:
            return self._events.pop()
        except IndexError:
            return self._new_event()

    def _take_anchor(self) -> None:
        """Tie a GPU's clock to the host's. This waits for the GPU, once per run."""
        event = self._new_event()
        event.record()
        event.synchronize()
        self._anchor = event, time.perf_counter()

    def _sum(self, name: str, layer: int | None) -> Sum:
        key = name, layer
        found = self._sums.get(key)
        if found is None:
            _kind(name)
            found = self._sums[key] = Sum()
        return found

    def _fold(self) -> None:
        """Add up the finished spans."""
        for _ in range(len(self._pending)):
            name, layer, first, last, size, flops, done = pending = self._pending.popleft()
            if not last.query():
                self._pending.append(pending)
                continue
            assert self._anchor is not None
            begin = self._anchor[1] + self._anchor[0].elapsed_time(first) * 1e-3
            end = begin + first.elapsed_time(last) * 1e-3
            self._events += first, last
            self._count(Interval(name, layer, _kind(name).row, begin, end, size, flops), 0.0, done)
        for _ in range(len(self._done)):
            name, layer, begin, end, waited, size, flops, done = self._done.popleft()
            row = _kind(name).row
            row = ON_HOST if row == "GPU" else row
            self._count(Interval(name, layer, row, begin, end, size, flops), waited, done)

    def _count(self, over: Interval, waited: float, done: Callable[[float], None] | None) -> None:
        found = self._sum(over.name, over.layer)
        found.seconds += over.end - over.begin
        found.waited += waited
        found.bytes += over.bytes
        found.flops += over.flops
        found.count += 1
        if done is not None:
            done(over.end - over.begin)
        if self._listener is not None:
            self._listener(over)


def _event() -> Any:
    gpu = accelerator()
    assert gpu is not None, "a span in a GPU's stream, where there is no GPU"
    return gpu.event(timing=True)


RECORDER = Recorder()
"""The process's own recorder. The functions of this module pass spans to it."""
# A fork waits for threads that add spans up: a child would find the lock held by a thread that it does not have
os.register_at_fork(
    before=RECORDER._lock.acquire, after_in_parent=RECORDER._lock.release, after_in_child=RECORDER._lock.release
)
span, begin, end, device, add, expect = (
    RECORDER.span,
    RECORDER.begin,
    RECORDER.end,
    RECORDER.device,
    RECORDER.add,
    RECORDER.expect,
)
