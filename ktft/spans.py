"""Where a training step's time goes: spans with a name, a layer and two ends, on the host or between events of a GPU.

Two views are kept apart. A span's `seconds` are its whole length, however many others run meanwhile: how long that lane
was busy. Its `waited` are what the line of training itself, the main thread or the one that runs backward for it, spent
in it and in no span inside of it: these, with what lies in no span, add up to a step, whatever overlaps.
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

NAMES = {
    "attention": "GPU",
    "cpu": "CPU experts",
    "stream": "GPU",
    "resident": "GPU",
    "copy_in": "PCIe in",
    "copy_out": "PCIe out",
    "wait": "waiting",
    "optimizer": "optimizer",
    "data": "data",
}
"""Name of a span -> the row of a trace that it is drawn in."""
PARALLEL = ("attention", "cpu", "stream", "resident", "copy_in", "copy_out")
"""Names of what may run at once."""
ON_HOST = "torch on the CPU"
"""The row of what would be the GPU's, where there is none."""

_FOLDED = 8192  # spans kept apart before they are added up, between two calls of `take`


@dataclass(slots=True)
class Sum:
    """What the spans of one name and layer come to.

    Attributes:
        seconds: from begin to end, of all of them.
        waited: of these, what the line of training spent there.
        expected: seconds that were predicted for them.
        bytes, flops: that they moved and computed, as their callers said.
        count: how many there were.
    """

    seconds: float = 0.0
    waited: float = 0.0
    expected: float = 0.0
    bytes: float = 0
    flops: float = 0
    count: int = 0

    def add(self, other: Sum) -> None:
        """Add another's figures."""
        self.seconds += other.seconds
        self.waited += other.waited
        self.expected += other.expected
        self.bytes += other.bytes
        self.flops += other.flops
        self.count += other.count


Sums = dict[tuple[str, int | None], Sum]
"""By name and layer; None is what belongs to no layer."""


class Interval(NamedTuple):
    """One span that is over; `begin` and `end` are seconds of `time.perf_counter`, also of those on a GPU."""

    name: str
    layer: int | None
    row: str
    begin: float
    end: float
    bytes: float
    flops: float


class Span:
    """A span to be begun and ended, by hand or as a context.

    Attributes:
        bytes, flops: may be set until it ends.
        done: likewise; called with its seconds once they are known, for a GPU's at a step's end, in whatever thread. It
            must not call the recorder.
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
    """By the clock, as part of what its thread does: spans begun inside of it end before it."""

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
            pass  # one inside, that an exception kept from its end
        seconds = ended - self.began
        if stack:
            stack[-1].inside += seconds
        in_line = self.thread == self.recorder.thread or torch._C._current_graph_task_id() >= 0
        waited = seconds - self.inside if in_line else 0.0
        self.recorder.put((self.name, self.layer, self.began, ended, waited, self.bytes, self.flops, self.done))
        if self.profiled is not None:
            self._end_profile()


class _AsideSpan(Span):
    """By the clock, of what goes on while its thread does other things. Any thread may end it."""

    __slots__ = ("began",)

    def begin(self) -> Span:
        self.began = time.perf_counter()
        return self

    def end(self) -> None:
        ended = time.perf_counter()
        self.recorder.put((self.name, self.layer, self.began, ended, 0.0, self.bytes, self.flops, self.done))


class _DeviceSpan(Span):
    """Between two events of a stream. Nobody waits for them: they are read once they have come to pass."""

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
    """Takes spans from all threads while `on`, and adds them up by name and layer.

    Args:
        event: makes a GPU's events, with timing.

    Attributes:
        on: whether spans are taken. `start` leaves it off; it is on only within training's steps.
        thread: that of training.
        stacks: by thread, host spans that are open.
    """

    def __init__(self, event: Callable[[], Any] | None = None) -> None:
        self.on = False
        self.thread = threading.get_ident()
        self.stacks: dict[int, list[_HostSpan]] = {}
        self._listener: Callable[[Interval], None] | None = None
        self._new_event = event or _event
        self._events: list[Any] = []  # that may be used again
        self._anchor: tuple[Any, float] | None = None  # an event, and when it came to pass by the host's clock
        self._done: deque[tuple[Any, ...]] = deque()
        self._pending: deque[tuple[Any, ...]] = deque()
        self._sums: Sums = {}
        self._lock = threading.Lock()
        self._nothing = Span(self, "", None, 0, 0)

    # --- by those who run something -----------------------------------------------------------------------------------

    def span(self, name: str, layer: int | None = None, *, bytes: float = 0, flops: float = 0) -> Span:
        """A block of work that its thread does: `with spans.span("cpu", 3, bytes=..., flops=...):`."""
        if not self.on:
            return self._nothing
        return _HostSpan(self, name, layer, bytes, flops)

    def begin(self, name: str, layer: int | None = None, *, bytes: float = 0, flops: float = 0) -> Span:
        """Begin what goes on by itself, such as work handed to other threads; `end` takes what this gives."""
        if not self.on:
            return self._nothing
        return _AsideSpan(self, name, layer, bytes, flops).begin()

    def end(self, span: Span) -> None:
        """End what `begin` began, in whatever thread."""
        span.end()

    def device(
        self, name: str, layer: int | None = None, stream: Any = None, *, bytes: float = 0, flops: float = 0
    ) -> Span:
        """Work enqueued in a device's stream within the block; `span` where it is None or the CPU's."""
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
        """A span that was measured elsewhere, by `time.perf_counter`; `waited`: training did nothing else meanwhile."""
        if self.on:
            self.put((name, layer, begin, end, end - begin if waited else 0.0, bytes, flops, None))

    def expect(self, layer: int | None, seconds: Mapping[str, float]) -> None:
        """Note what a prediction by name says, beside what will be measured."""
        if self.on:
            with self._lock:
                for name, predicted in seconds.items():
                    self._sum(name, layer).expected += predicted

    # --- by those who train -------------------------------------------------------------------------------------------

    def start(self, listener: Callable[[Interval], None] | None = None) -> None:
        """Begin a run in this thread, with nothing recorded. A listener is told of every span, when it is added up."""
        self.on, self._listener, self.thread = False, listener, threading.get_ident()
        for left in (self._done, self._pending, self._sums, self.stacks):
            left.clear()
        self._anchor = None
        gpu = accelerator()
        if gpu is not None and gpu.is_initialized():
            self._take_anchor()

    def take(self) -> Sums:
        """Sums since the call before, at a step's end. Device spans that are not over yet are in the next call's."""
        with self._lock:
            self._fold()
            sums, self._sums = self._sums, {}
        for stack in list(self.stacks.values()):
            stack.clear()
        return sums

    def stop(self, *, wait: bool) -> Sums:
        """End the run: what was still to be taken, with `wait` also what a GPU has to end first."""
        self.on = False
        if wait:
            for _, _, _, last, *_ in self._pending:
                last.synchronize()
        else:
            self._pending.clear()
        sums = self.take()
        self._listener = None
        return sums

    # --- by spans -----------------------------------------------------------------------------------------------------

    def put(self, done: tuple[Any, ...]) -> None:
        """(name, layer, begin, end, waited, bytes, flops, done) of a span that is over."""
        self._done.append(done)  # atomic: no lock on the way of those who work
        if len(self._done) > _FOLDED:
            with self._lock:
                self._fold()

    def put_device(self, pending: tuple[Any, ...]) -> None:
        """(name, layer, first event, last event, bytes, flops, done) of a span that may go on."""
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
        """Tie a GPU's clock to the host's; waits for the GPU, once in a run."""
        event = self._new_event()
        event.record()
        event.synchronize()
        self._anchor = event, time.perf_counter()

    def _sum(self, name: str, layer: int | None) -> Sum:
        key = name, layer
        found = self._sums.get(key)
        if found is None:
            if name not in NAMES:
                raise ValueError(f"no span is called {name!r}; names: {', '.join(NAMES)}")
            found = self._sums[key] = Sum()
        return found

    def _fold(self) -> None:
        """Add up what is over."""
        for _ in range(len(self._pending)):
            name, layer, first, last, size, flops, done = pending = self._pending.popleft()
            if not last.query():
                self._pending.append(pending)
                continue
            assert self._anchor is not None
            begin = self._anchor[1] + self._anchor[0].elapsed_time(first) * 1e-3
            end = begin + first.elapsed_time(last) * 1e-3
            self._events += first, last
            self._count(Interval(name, layer, NAMES.get(name, ""), begin, end, size, flops), 0.0, done)
        for _ in range(len(self._done)):
            name, layer, begin, end, waited, size, flops, done = self._done.popleft()
            row = ON_HOST if NAMES.get(name) == "GPU" else NAMES.get(name, "")
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
"""The process's own. Spans go to it through the functions of this module."""
# A fork waits for those who add spans up, so that no child finds the lock held by a thread that it does not have
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
