"""Which lanes `placement: auto` uses for batches of one size: what whole steps show to be fastest.

The placer's rates say what each lane takes alone. They cannot say what lanes take from each other: threads that compute
experts slow down the one that gives the GPU its work, by half where two of them share a core, and copies ahead of time
cost nothing where attention lasts as long. So the modes that the rates find promising are tried, some steps each, and
those that come out near each other some more; the best one is taken until the next trial. Only steps of one trial are
compared, since what a machine can do changes. A step after one in another mode finds none of the experts which
that one would have left on the GPU, and one after a pause finds caches and clocks cold: these do not count. Medians
decide: what one step takes is a fourth off now and then, in both directions.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ktft.lanes.terms import Mode

TRIED = (Mode.AUTO, Mode.STREAM, Mode.CPU)
"""The modes that `auto` chooses from."""
PROMISING = 2.0
"""A mode is tried that the rates expect to take no more than so many times the best one's time."""
TRIALS, MORE = 3, 2
"""Steps that count of each mode, and further ones of those that are near the best one then."""
AGAIN, AT_MOST = 64, 512
"""Steps to the next trial, of the best mode and of the second if it is near; each that ends alike doubles them."""
NEAR = 1.25
WORSE = 1.15
"""The next trial comes at once if the last steps took so many times what they took in the one before."""
PAUSE, PAUSES = 3.0, 16
"""A step counts if what passed since the last one is at most so many times the shortest of so many such pauses of its
size: what a model does before its first experts takes as long as there are tokens.
"""


class _Size:
    """What is known of batches of about one size.

    Args:
        modes: to be tried.
    """

    def __init__(self, modes: Sequence[Mode]) -> None:
        self.pauses: deque[float] = deque(maxlen=PAUSES)
        self._trial: dict[Mode, list[float]] = {mode: [] for mode in modes}  # seconds that count
        self._near: list[Mode] = []  # the last trial's best mode, and the second if it is near; none while one goes on
        self._usual, self._last = 0.0, deque[float](maxlen=TRIALS + MORE)  # of the chosen mode: then, and now
        self._left = self._again = AGAIN
        self._before: Mode | None = None  # the last step's mode
        self._chosen: Mode | None = None  # the last trial's

    def next(self) -> Mode:
        """The mode of the next step."""
        if self._near:
            return self._near[0]
        lacking = self._lacking()
        return self._before if self._before in lacking else lacking[0]

    def add(self, mode: Mode, seconds: float, paused: bool) -> None:
        """A step is over."""
        if mode == self._before and not paused:
            (self._last if self._near else self._trial[mode]).append(seconds)
        self._before = mode
        if not self._near and not self._lacking():
            self._choose()
        elif self._near:
            self._left -= 1
            worse = len(self._last) == self._last.maxlen and statistics.median(self._last) > WORSE * self._usual
            if len(self._near) > 1 and (worse or self._left <= 0):
                self._trial, self._near = {near: [] for near in self._near}, []

    def _lacking(self) -> list[Mode]:
        """Modes that the trial has not seen often enough."""
        new = [mode for mode, seconds in self._trial.items() if len(seconds) < TRIALS]
        if new:
            return new
        near = self._ranked()
        return [mode for mode in near if len(near) > 1 and len(self._trial[mode]) < TRIALS + MORE]

    def _ranked(self) -> list[Mode]:
        """The trial's best mode and those near it, by their medians."""
        usual = {mode: statistics.median(seconds) for mode, seconds in self._trial.items()}
        ranked = sorted(usual, key=lambda mode: usual[mode])
        return [mode for mode in ranked if mode == ranked[0] or usual[mode] < NEAR * usual[ranked[0]]]

    def _choose(self) -> None:
        before = self._chosen
        self._near = self._ranked()[:2]
        self._chosen = self._near[0]
        self._again = min(2 * self._again, AT_MOST) if self._chosen == before else AGAIN
        self._usual, self._left = statistics.median(self._trial[self._chosen]), self._again
        self._last.clear()


@dataclass(frozen=True)
class _Step:
    size: _Size
    mode: Mode
    began: float
    paused: bool


class Choice:
    """One model's, for all of its layers: a step has one mode.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._step: _Step | None = None
        self._ended: float | None = None

    def mode(self, tokens: int, expected: Callable[[], Mapping[Mode, float]]) -> Mode:
        """The mode of the step at hand, which begins with its first call.

        Args:
            tokens: of the micro-batch.
            expected: seconds of a layer by mode, as the rates have it; asked for once a size.
        """
        if self._step is None:
            bucket = round(2 * math.log2(max(tokens, 1)))
            if bucket not in self._sizes:
                seconds = expected()
                worth = PROMISING * min(seconds.values())
                modes = [mode for mode in TRIED if seconds[mode] <= worth]
                self._sizes[bucket] = _Size(modes)
            size, now = self._sizes[bucket], self._clock()
            self._step = _Step(size, size.next(), now, self._paused(size, now))
        return self._step.mode

    def begin_step(self) -> None:
        """A step begins: passes since the last one were none of it."""
        self._step = None

    def end_step(self) -> None:
        """The step is over."""
        if self._step is None:
            return
        step, self._step, ended = self._step, None, self._clock()
        step.size.add(step.mode, ended - step.began, step.paused)
        self._ended = ended

    def _paused(self, size: _Size, now: float) -> bool:
        if self._ended is None:
            return True
        size.pauses.append(now - self._ended)
        return size.pauses[-1] > PAUSE * min(size.pauses)
