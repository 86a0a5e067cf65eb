"""Which lanes `placement: auto` uses for batches of one size: what whole steps show to be fastest.

The placer's rates say what each lane takes alone. They cannot say what lanes take from each other: threads that compute
experts slow down the one that gives the GPU its work, by half where two of them share a core, and copies ahead of time
cost nothing where attention lasts as long. So the ways that the rates find promising are tried, some steps each, and
those that come out near each other some more. A step after one that went another way finds none of the experts which
that one would have left on the GPU, and one after a pause finds caches and clocks cold: these do not count. Medians
decide: what one step takes is a fourth off now and then, in both directions.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

WAYS = ("auto", "stream", "cpu")
"""Modes of the placer: experts split as the rates say, all streamed that are not resident, all on the CPU."""
PROMISING = 2.0
"""A way is tried that the rates expect to take no more than so many times the best one's time."""
TRIALS, MORE = 3, 2
"""Steps that count of each way, and further ones of those that are near the best one then."""
AGAIN = 64
"""Steps after which the second best way, if it is near, is tried once more: a machine's neighbours come and go."""
NEAR = 1.25
PAUSE, PAUSES = 3.0, 16
"""A step counts if what passed since the last one is at most so many times the shortest of so many such pauses of its
size: what a model does before its first experts takes as long as there are tokens.
"""


@dataclass
class _Size:
    """What is known of batches of about one size: seconds of the last steps by way, and steps in all."""

    seconds: dict[str, deque[float]]
    steps: int = 0
    before: str | None = None  # the last step's way
    pauses: deque[float] = field(default_factory=lambda: deque(maxlen=PAUSES))

    def next(self) -> str:
        """The way of the next step."""
        lacking = self._lacking()
        if lacking:
            return self.before if self.before in lacking else lacking[0]
        best, *near = self._near()
        return near[0] if near and self.steps % AGAIN < 2 else best

    def add(self, way: str, seconds: float, paused: bool) -> None:
        """A step is over."""
        if way == self.before and not paused:
            self.seconds[way].append(seconds)
        self.before = way
        self.steps += 1

    def _lacking(self) -> list[str]:
        """Ways to be tried before one is chosen."""
        new = [way for way, seconds in self.seconds.items() if len(seconds) < TRIALS]
        if new:
            return new
        near = self._near()
        return [way for way in near if len(near) > 1 and len(self.seconds[way]) < TRIALS + MORE]

    def _near(self) -> list[str]:
        """The best way and those near it, by their medians."""
        usual = {way: statistics.median(seconds) for way, seconds in self.seconds.items()}
        ranked = sorted(usual, key=lambda way: usual[way])
        return [way for way in ranked if way == ranked[0] or usual[way] < NEAR * usual[ranked[0]]]


@dataclass(frozen=True)
class _Step:
    size: _Size
    way: str
    began: float
    paused: bool


class Choice:
    """One model's, for all of its layers: a step goes one way.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._step: _Step | None = None
        self._ended: float | None = None

    def way(self, tokens: int, expected: Callable[[], Mapping[str, float]]) -> str:
        """The way of the step at hand, which begins with its first call.

        Args:
            tokens: of the micro-batch.
            expected: seconds of a layer by way, as the rates have it; asked for once a size.
        """
        if self._step is None:
            bucket = round(2 * math.log2(max(tokens, 1)))
            if bucket not in self._sizes:
                seconds = expected()
                worth = PROMISING * min(seconds.values())
                ways = [way for way in WAYS if seconds[way] <= worth]
                self._sizes[bucket] = _Size({way: deque(maxlen=TRIALS + MORE) for way in ways})
            size, now = self._sizes[bucket], self._clock()
            self._step = _Step(size, size.next(), now, self._paused(size, now))
        return self._step.way

    def begin_step(self) -> None:
        """A step begins: passes since the last one were none of it."""
        self._step = None

    def end_step(self) -> None:
        """The step is over."""
        if self._step is None:
            return
        step, self._step, ended = self._step, None, self._clock()
        step.size.add(step.way, ended - step.began, step.paused)
        self._ended = ended

    def _paused(self, size: _Size, now: float) -> bool:
        if self._ended is None:
            return True
        size.pauses.append(now - self._ended)
        return size.pauses[-1] > PAUSE * min(size.pauses)
