"""Which lanes `placement: auto` uses for batches of one size: what whole steps show to be fastest.

The placer's rates say what each lane takes alone. They cannot say what lanes take from each other: threads that compute
experts slow down the one that gives the GPU its work, by half where two of them share a core, and copies ahead of time
cost nothing where attention lasts as long. So the ways that the rates find promising are tried, a step each in turns,
and those that come out near each other some more times. Medians decide: what one step takes is a fourth off now and
then, in both directions.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

WAYS = ("auto", "stream", "cpu")
"""Modes of the placer: experts split as the rates say, all streamed that are not resident, all on the CPU."""
PROMISING = 1.6
"""A way is tried that the rates expect to take no more than so many times the best one's time."""
TRIALS, MORE = 3, 5
"""Steps of each way, and further ones of those that are near the best one then."""
AGAIN = 64
"""Steps after which the second best way, if it is near, is tried once more: a machine's neighbours come and go."""
NEAR = 1.25
_REMEMBERED = TRIALS + MORE


@dataclass
class _Size:
    """What is known of batches of about one size: seconds of the last steps by way, and steps in all."""

    seconds: dict[str, deque[float]] = field(default_factory=dict)
    steps: int = 0

    def next(self) -> str:
        """The way of the next step."""
        fewest = self._fewest(self.seconds)
        if len(self.seconds[fewest]) < TRIALS:
            return fewest
        usual = {way: statistics.median(seconds) for way, seconds in self.seconds.items()}
        best, *others = sorted(usual, key=lambda way: usual[way])
        near = [way for way in others if usual[way] < NEAR * usual[best]]
        fewest = self._fewest([best, *near])
        if near and len(self.seconds[fewest]) < TRIALS + MORE:
            return fewest
        return near[0] if near and self.steps % AGAIN == 0 else best

    def _fewest(self, ways: Iterable[str]) -> str:
        return min(ways, key=lambda way: len(self.seconds[way]))


class Choice:
    """One model's, for all of its layers: a step goes one way.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._step: tuple[_Size, str, float] | None = None

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
                self._sizes[bucket] = _Size({way: deque(maxlen=_REMEMBERED) for way in WAYS if seconds[way] <= worth})
            size = self._sizes[bucket]
            self._step = size, size.next(), self._clock()
        return self._step[1]

    def begin_step(self) -> None:
        """A step begins: passes since the last one were none of it."""
        self._step = None

    def end_step(self) -> None:
        """The step is over."""
        if self._step is None:
            return
        (size, way, began), self._step = self._step, None
        if size.steps:  # the first one of a size makes buffers and kernels
            size.seconds[way].append(self._clock() - began)
        size.steps += 1
