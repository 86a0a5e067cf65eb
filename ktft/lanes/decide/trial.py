"""Chooses the mode of `placement: auto` for batches of one size: the one in which whole steps are fastest.

The placer's rates say what each lane takes alone. They cannot say what the lanes take from each other: threads that
compute experts slow down the thread that launches the GPU's kernels, by half where two of them share a core, and
prefetching costs nothing where attention takes as long as the copies. So this module tries each mode that looks
promising by the rates for a few steps, and those that come out close for a few more. The best one is used until the
next trial. Only steps of one trial are compared, because the machine's speed changes. Two kinds of step do not count:
a step after one in another mode, which finds none of the experts that its own mode would have left on the GPU, and a
step after a pause, which finds caches and clocks cold. Medians decide, because single steps are off by a quarter now
and then, in both directions.
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
"""A mode is tried if the rates expect it to take at most this many times as long as the best one."""
TRIALS, MORE = 3, 2
"""Steps that a trial counts of each mode, and further ones of the modes that are then near the best."""
AGAIN, AT_MOST = 64, 512
"""Steps until the next trial, which compares the best mode and the second if it is near. A trial with the same result
as the one before doubles this number, up to `AT_MOST`.
"""
NEAR = 1.25
"""A mode is near the best if its steps take less than this many times as long."""
WORSE = 1.15
"""The next trial begins at once if recent steps took more than this many times what they took in the last trial."""
PAUSE, PAUSES = 3.0, 16
"""A step counts if the pause before it was at most `PAUSE` times the shortest of the last `PAUSES` pauses before steps
of its size. They are compared by size because what a model does before its first experts grows with the tokens.
"""


class _Size:
    """What is known about batches of about one size, for which these modes are tried."""

    def __init__(self, modes: Sequence[Mode]) -> None:
        self.pauses: deque[float] = deque(maxlen=PAUSES)
        self._trial: dict[Mode, list[float]] = {mode: [] for mode in modes}  # seconds that count
        self._near: list[Mode] = []  # the last trial's best mode, and the second if it is near; empty during a trial
        self._usual = 0.0  # what the chosen mode took in its trial
        self._last: deque[float] = deque(maxlen=TRIALS + MORE)  # and since
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
        """Count a step that is over."""
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
        """The modes of which the trial needs more steps."""
        new = [mode for mode, seconds in self._trial.items() if len(seconds) < TRIALS]
        if new:
            return new
        near = self._ranked()
        return [mode for mode in near if len(near) > 1 and len(self._trial[mode]) < TRIALS + MORE]

    def _ranked(self) -> list[Mode]:
        """The trial's best mode and those near it, best first, by their medians."""
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
    """Chooses for one model. All layers of a step have the same mode."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._sizes: dict[int, _Size] = {}
        self._step: _Step | None = None
        self._ended: float | None = None

    def mode(self, tokens: int, expected: Callable[[], Mapping[Mode, float]]) -> Mode:
        """The mode of the current step, which begins with the first call of this.

        Args:
            tokens: how many the micro-batch has.
            expected: gives the seconds of a layer in each mode, by the rates; called once for each size.
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
        """A step begins; passes since the last one do not belong to it."""
        self._step = None

    def end_step(self) -> None:
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
