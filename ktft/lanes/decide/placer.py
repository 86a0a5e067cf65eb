"""Decides where each expert in use runs, for every layer and micro-batch, so that the slowest lane ends soonest."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ktft.config import Settings
from ktft.lanes.decide.costs import Costs, LayerKind, Number, Rates, costs
from ktft.lanes.terms import PASSES, Lane, Mode, Where, Work

# How measured times correct rates. Each measurement corrects this share of the logarithm by which a lane is off, and
# none counts as more than a factor of two. All layers of a kind share their rates, so one step of a model corrects most
# of the error.
_GAIN, _MOST, _LIMIT = 0.15, math.log(2.0), math.log(16.0)
_STEP = math.log(1.5)  # experts whose rows differ by less are of one class
_FIRST = 1000  # more than any class
_FADE = 0.002  # of the correction of a lane that is not used or measured, so that one bad moment does not last

_LANES = tuple(Lane)  # Python walks a tuple five times sooner than an enum
_WORTH = 0.02  # what one more lane must gain: rates are not known more exactly


@dataclass(frozen=True)
class Placement:
    """Experts in use by where they run, most rows first.

    Attributes:
        seconds: expected in each lane, by corrected rates.
        expected: seconds by the rates without corrections; copies that began before the decision are left out.
        ahead: experts that are worth prefetching before the next such decision.
    """

    cpu: list[int]
    stream: list[int]
    resident: list[int]
    seconds: dict[Lane, float]
    expected: dict[Lane, float]
    ahead: list[int] = field(default_factory=list)

    @property
    def slowest(self) -> Lane:
        """The lane that the others wait for."""
        return max(self.seconds, key=lambda lane: self.seconds[lane])

    @property
    def copies_hidden(self) -> float:
        """The seconds for which more could be copied while the GPU is at work on what it has."""
        return max(0.0, self.seconds[Lane.GPU] - self.seconds[Lane.COPY])

    def experts(self, where: Where) -> list[int]:
        """The experts whose rows run there."""
        found: list[int] = getattr(self, where)
        return found


@dataclass(frozen=True)
class Coming:
    """Prefetched experts: their packed bytes are in flight to the GPU before it is decided where they run."""

    experts: Collection[int] = ()
    arrived: float = 0.0  # how many are there by now; an expert that is half there counts as 0.5

    def among(self, placement: Placement) -> int:
        """How many of them the placement streams."""
        if not self.experts:
            return 0
        return len(placement.stream) + len(self.experts) - len({*placement.stream, *self.experts})


def usable_placement(settings: Settings, *, cuda: bool) -> str:
    """The placement to use on a machine with or without CUDA.

    Raises:
        ValueError: the settings ask for a GPU, and there is none.
    """
    if cuda:
        return settings.placement
    if settings.needs_gpu:
        raise ValueError(
            f"{settings.needs_gpu}, but torch sees no GPU: torch.cuda.is_available() is False (no driver, "
            "CUDA_VISIBLE_DEVICES, or a CPU build of torch). Set placement: auto and gpu_expert_memory: 0 to run all "
            "experts on the CPU"
        )
    return "cpu"


_NOTHING = Coming()


class Placer:
    """Decides for all layers of one kind, and learns from what they took. Each kind of layer has one placer.

    Three lanes run at once: the CPU, the copies over PCIe, and the GPU, which decodes and multiplies while the next
    experts are copied. An expert costs the CPU max(reading its weights, computing its rows). With few rows memory is
    the limit, and more rows are free until their products take as long. Each thread computes one expert after another,
    so these maxima add up. PCIe takes the same time for every expert. So the experts with the most rows go to the GPU,
    and the only question is how many: the answer is where the sums of the lanes meet.

    `rates` are measured by `calibrate`, or described; `mode` is one of `Mode`.
    """

    def __init__(self, kind: LayerKind, rates: Rates, mode: str = Mode.AUTO) -> None:
        self.kind, self.rates, self.mode = kind, rates, Mode(mode)
        self._base = {work: costs(kind, rates, work) for work in PASSES}
        self._off = {work: dict.fromkeys(Lane, 0.0) for work in PASSES}  # logarithms of measured / predicted
        self._factors = {work: dict.fromkeys(Lane, 1.0) for work in PASSES}
        self._corrected: dict[Work, Costs] = {}  # what `_costs` made since the factors last changed

    def decide(
        self,
        counts: Sequence[int],
        resident: Collection[int],
        work: Work,
        mode: Mode | None = None,
        coming: Coming = _NOTHING,
    ) -> Placement:
        """Decide where each expert with rows runs.

        Args:
            counts: rows by expert.
            resident: experts whose weights are on the GPU. They run there, unless that makes the GPU the slowest lane:
                then those with the fewest rows run on the CPU.
            work: what the layer computes. For `BOTH` the seconds are forward's, and `again` gives those of backward.
            mode: overrides the placer's own.
            coming: prefetched experts. They run on the GPU, except under `CPU`. If fewer of them would have been
                better, `Placement.ahead` has only those.

        A lane is left out if it would gain less than 2%. Equal counts give equal decisions: experts with about the same
        number of rows are ordered by their number.
        """
        # Lists, not arrays: this runs once a layer, and by then numpy's code has left the processor's caches
        alike, stay, set_out = list(map(_CLASSES.__getitem__, counts)), list[int](), 0
        if resident:
            stay = [expert for expert in sorted(resident) if alike[expert]]
            stay.sort(key=counts.__getitem__, reverse=True)
            for expert in stay:
                alike[expert] = 0
        for expert in coming.experts:
            if alike[expert]:
                alike[expert] += _FIRST
                set_out += 1
        streamed = sorted(range(len(alike)), key=alike.__getitem__, reverse=True)[: len(alike) - alike.count(0)]
        mode = mode or self.mode
        if mode == Mode.AUTO:
            rows = counts.__getitem__
            best, j = self._cuts(list(map(rows, streamed)), list(map(rows, stay)), work, coming.arrived)
        else:
            best, j = len(streamed) if mode == Mode.STREAM else 0, 0 if mode == Mode.CPU else len(stay)
        n = max(best, set_out) if best else 0
        cpu, now = streamed[n:] + stay[j:], Work.FORWARD if work == Work.BOTH else work
        seconds = self._seconds(cpu, n, j, counts, now, coming.arrived, set_out if n else 0)
        return Placement(cpu, streamed[:n], stay[:j], *seconds, streamed[:best])

    def again(self, placement: Placement, counts: Sequence[int], work: Work, coming: Coming = _NOTHING) -> Placement:
        """Leave every expert where it is, with the seconds of other work, or with other experts in flight."""
        cpu, stream, resident = placement.cpu, placement.stream, placement.resident
        set_out = coming.among(placement)
        seconds = self._seconds(cpu, len(stream), len(resident), counts, work, coming.arrived, set_out)
        return Placement(cpu, stream, resident, *seconds, placement.ahead)

    def _seconds(
        self, cpu: list[int], n: int, j: int, counts: Sequence[int], work: Work, arrived: float, set_out: int
    ) -> tuple[dict[Lane, float], dict[Lane, float]]:
        """`seconds` and `expected` of a `Placement` with n streamed experts, j residents, and these on the CPU."""
        cost, rows, own = self._base[work], sum(counts), list(map(counts.__getitem__, cpu))
        used, tokens = n + j + len(cpu), rows / self.kind.top_k
        left = sum(cost.cpu.experts(own))
        gpu = (rows - sum(own)) * cost.gpu.row + (n + j) * cost.gpu.expert
        now = _times(n, j, used, left, 0.0, gpu, min(n, arrived), tokens, cost)
        after = _times(n, j, used, left, 0.0, gpu, set_out, tokens, cost)
        corrected = map(mul, now, self.corrections(work).values())
        return dict(zip(_LANES, corrected, strict=True)), dict(zip(_LANES, after, strict=True))

    def _cuts(self, streamed: list[int], stay: list[int], work: Work, arrived: float) -> tuple[int, int]:
        """How many experts to stream, and how many residents run on the GPU, of those with these rows."""
        cost = self._costs(work)
        if work == Work.BOTH:
            arrived /= 2  # an expert that has arrived saves one of its two copies
        tokens = (sum(streamed) + sum(stay)) / self.kind.top_k
        best, (*others, gpu) = _soonest(streamed, stay, tokens, cost, arrived)
        if not stay or gpu <= max(others):
            return best, len(stay)
        return _fewer_residents(streamed, stay, tokens, cost, arrived)

    def observe(self, work: Work, placement: Placement, seconds: Mapping[Lane, float]) -> None:
        """Correct the rates by what a layer took.

        This may happen any time after `decide`, and for many layers at once, because a correction is a mean and not a
        step from the one before.

        Args:
            seconds: of the lanes that were measured. `CPU` is from when hidden states leave the GPU until the sum is
                back. `COPY` is from the start of the first copy until the last copied expert is multiplied, so that the
                end of the pipeline counts. `GPU` is the time in which kernels of experts ran, residents included.
        """
        off = self._off[work]
        for lane, expected in placement.expected.items():
            measured = seconds.get(lane, 0.0)
            if expected > 0 and 0 < measured < math.inf:
                wrong = math.log(measured / expected) - off[lane]
                off[lane] += _GAIN * min(max(wrong, -_MOST), _MOST)
                off[lane] = min(max(off[lane], -_LIMIT), _LIMIT)
            else:
                off[lane] *= 1 - _FADE
        self._factors[work] = {lane: math.exp(each) for lane, each in off.items()}
        self._corrected.clear()

    def _costs(self, work: Work) -> Costs:
        """The corrected costs. They are made when a decision asks for them, since forced modes never do."""
        if work not in self._corrected:
            self._corrected[work] = (
                self._costs(Work.FORWARD).plus(self._costs(Work.BACKWARD))
                if work == Work.BOTH
                else self._base[work].corrected(self._factors[work])
            )
        return self._corrected[work]

    def corrections(self, work: Work) -> dict[Lane, float]:
        """The factor by which each lane's seconds exceed what the rates say."""
        return self._factors[work]


class _Classes(dict[int, int]):
    """Maps a number of rows to its class, which is higher for more rows and the same for about as many.

    Experts of one class are ordered by their number: neighbours are adjacent in memory, so one copy takes them all.
    """

    def __missing__(self, rows: int) -> int:
        self[rows] = found = 1 + math.ceil(math.log(rows) / _STEP) if rows else 0
        return found


_CLASSES = _Classes()


def _soonest(
    streamed: list[int], stay: list[int], tokens: float, cost: Costs, arrived: float
) -> tuple[int, tuple[float, ...]]:
    """How many experts to stream while all residents stay, so that the slowest lane ends soonest; and each lane's
    seconds. The answer is all or none if that is nearly as good.

    Each further expert leaves the CPU less to do and the other lanes more. So the best number is where they meet, or
    one fewer, or all, because then no hidden states cross PCIe.
    """
    size, j = len(streamed), len(stay)
    on_cpu = list(accumulate(cost.cpu.experts(streamed), initial=0.0))
    rows = list(accumulate(streamed, initial=sum(stay)))
    _, expert, row = cost.gpu

    def times(n: int) -> tuple[float, ...]:
        gpu = rows[n] * row + (n + j) * expert
        return _times(n, j, size + j, on_cpu[-1], on_cpu[n], gpu, min(n, arrived), tokens, cost)

    def met(n: int) -> bool:
        cpu, *others = times(n)
        return cpu <= max(others)

    meet = bisect_left(range(size), True, key=met)
    found = {n: times(n) for n in (max(meet - 1, 0), meet, 0, size)}
    best = min(found, key=lambda n: max(found[n]))
    enough = max(found[best]) * (1 + _WORTH)
    best = next((n for n in (size, 0) if max(found[n]) <= enough), best)
    return best, found[best]


def _group(rows: list[int], cost: Costs) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """n = 0, 1, ... up to all experts with these rows; and seconds of the first n of them on the CPU and on the GPU."""
    _, expert, row = cost.gpu
    on_gpu = [each * row + expert for each in rows]
    cpu, gpu = (np.array([0.0, *accumulate(seconds)]) for seconds in (cost.cpu.experts(rows), on_gpu))
    return np.arange(len(rows) + 1), cpu, gpu


def _fewer_residents(
    streamed: list[int], stay: list[int], tokens: float, cost: Costs, arrived: float
) -> tuple[int, int]:
    """How many experts to stream and how many residents run on the GPU, so that the slowest lane ends soonest.

    Each further resident leaves the CPU less to do and the other lanes more. So for any number of streamed experts the
    best number of residents is where the lanes meet, or one fewer, or all.
    """
    n, some_cpu, some_gpu = _group(streamed, cost)
    all_j, here_cpu, here_gpu = _group(stay, cost)
    there, used, every = np.minimum(n, arrived), len(streamed) + len(stay), len(stay)
    both = some_cpu[-1] + here_cpu[-1]
    left = both - some_cpu + (cost.cpu.call + cost.cpu.cross * tokens)
    copies = n * cost.copy.expert - there * (cost.copy.expert - cost.copy.resident)
    # One row for each other lane: what it takes without residents, and what the first j of them add
    others = (
        (copies + (cost.copy.call + cost.copy.cross * tokens), all_j * cost.copy.resident),
        (some_gpu + cost.gpu.call, here_gpu),
    )
    meets = [(here_cpu + more).searchsorted(left - without) for without, more in others]
    meet = np.minimum(np.minimum.reduce(meets), every)
    j = np.stack([np.full_like(n, every), meet, np.maximum(meet - 1, 0)])
    times = _times(n, j, used, both, some_cpu + here_cpu[j], some_gpu + here_gpu[j], there, tokens, cost)
    best = int(np.maximum.reduce(times).argmin())
    return best % len(n), int(j.flat[best])


def _times(
    n: Number, j: Number, used: int, every: float, elsewhere: Number, gpu: Number, there: Number, tokens: float,
    cost: Costs,
) -> tuple[Number, ...]:  # fmt: skip
    """Seconds of each `Lane` if n of the `used` experts are streamed and j are residents on the GPU.

    `there` of the streamed ones have been copied already. The CPU would take `every` seconds for all experts, of which
    `elsewhere` are for those that it does not run. The GPU takes `gpu` seconds for its own.
    """
    on_gpu = n + j
    on_cpu = on_gpu < used
    return (
        cost.cpu.seconds(every, elsewhere, on_cpu, tokens),
        cost.copy.seconds(n, j, there, on_cpu, tokens),
        cost.gpu.seconds(gpu, on_gpu > 0),
    )
