"""Where each expert in use runs, decided for every layer and micro-batch: the slowest lane is to be done soonest."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from operator import add, mul
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ktft.config import Settings
from ktft.lanes.decide.costs import Costs, LayerKind, Rates, costs
from ktft.lanes.terms import PASSES, Lane, Mode, Where, Work

Number = TypeVar("Number", float, NDArray[Any])

# How measured times correct rates: of the logarithm by which a lane is off, this much each time, and no single time
# counts as more than twice off. A layer's neighbours see the same rates, so one step of a model corrects most of it.
_GAIN, _MOST, _LIMIT = 0.15, math.log(2.0), math.log(16.0)
_STEP = math.log(1.5)  # experts whose rows differ by less are alike
_FIRST = 1000  # more than any `_alike`
_FADE = 0.002  # of the correction of a lane that was not used or measured: a bad moment does not shut it for ever

_WORTH = 0.02  # what a lane more must gain, for rates are not known better


@dataclass(frozen=True)
class Placement:
    """Experts in use by where they run, most rows first.

    Attributes:
        seconds: that this takes in each lane.
        expected: what the rates alone expected, before corrections, of copies that had not set out before.
        ahead: experts that are worth being copied before the next such decision.
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

    def experts(self, where: Where) -> list[int]:
        """The experts whose rows run there."""
        found: list[int] = getattr(self, where)
        return found


@dataclass(frozen=True)
class Coming:
    """Experts whose packed bytes set out for the GPU before it was decided where they run, and how many of them are
    there by now; one that is half there counts as half a one.
    """

    experts: Collection[int] = ()
    arrived: float = 0.0

    def among(self, placement: Placement) -> int:
        """How many of them are streamed."""
        if not self.experts:
            return 0
        return len(placement.stream) + len(self.experts) - len({*placement.stream, *self.experts})


def usable_placement(settings: Settings, *, cuda: bool) -> str:
    """The placement that a machine with or without CUDA gives these settings.

    Raises:
        ValueError: they ask for a GPU, and there is none.
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
    """Decides for all layers of one kind, and learns from what they took. One a kind of layer.

    Three lanes run at once: the CPU; PCIe; the GPU's decoding and products, which go on while the next experts are
    copied. An expert costs the CPU max(reading its weights, computing its rows): with few rows memory is the limit, and
    rows are free until their products take as long; experts follow each other on each thread, so these maxima add up.
    PCIe takes as long for any expert. So the experts with most rows go to the GPU, and what is left to find is how
    many: where the lanes' sums meet.

    Args:
        kind: the layers' shape and format.
        rates: as calibrated or described.
        mode: `auto`, or `cpu`, `stream`, `resident` to force a lane; residents then stay on the GPU except under `cpu`.
    """

    def __init__(self, kind: LayerKind, rates: Rates, mode: str = Mode.AUTO) -> None:
        self.kind, self.rates, self.mode = kind, rates, Mode(mode)
        self._base = {work: costs(kind, rates, work) for work in PASSES}
        self._off = {work: dict.fromkeys(Lane, 0.0) for work in PASSES}  # logarithms of measured / predicted

    def _corrected(self, work: Work) -> Costs:
        return self._base[work].corrected(**self.corrections(work))

    def decide(
        self,
        counts: Sequence[int],
        resident: Collection[int],
        work: Work,
        mode: Mode | None = None,
        coming: Coming = _NOTHING,
    ) -> Placement:
        """Where the experts run that `counts` (rows an expert) gives rows.

        Args:
            resident: experts whose weights are on the GPU. They run there, unless that makes the GPU the slowest lane:
                then those with fewest rows go to the CPU.
            work: `forward` or `backward`; or `both`, for a forward whose backward needs what each lane retained: the
                seconds are then forward's, and `again` gives backward's.
            mode: instead of the placer's own.
            coming: experts on their way to the GPU. They run there, except under `cpu`; were it better to have fewer of
                them, these are `ahead`.

        A lane is left out where it would gain less than 2%. Equal counts give equal decisions: experts with about as
        many rows go by their number.
        """
        # No arrays: this runs once a layer, when numpy's code has long left the processor's caches
        alike, stay, set_out = list(map(_alike, counts)), list[int](), 0
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
            best, j = self._cuts([counts[e] for e in streamed], [counts[e] for e in stay], work, coming.arrived)
        else:
            best, j = len(streamed) if mode == Mode.STREAM else 0, 0 if mode == Mode.CPU else len(stay)
        n = max(best, set_out) if best else 0
        cpu, now = streamed[n:] + stay[j:], Work.FORWARD if work == Work.BOTH else work
        seconds = self._seconds(cpu, n, j, counts, now, coming.arrived, set_out if n else 0)
        return Placement(cpu, streamed[:n], stay[:j], *seconds, streamed[:best])

    def again(self, placement: Placement, counts: Sequence[int], work: Work, coming: Coming = _NOTHING) -> Placement:
        """The same experts in the same lanes, with the seconds of other work, or of other experts on their way."""
        cpu, stream, resident = placement.cpu, placement.stream, placement.resident
        set_out = coming.among(placement)
        seconds = self._seconds(cpu, len(stream), len(resident), counts, work, coming.arrived, set_out)
        return Placement(cpu, stream, resident, *seconds, placement.ahead)

    def _seconds(
        self, cpu: list[int], n: int, j: int, counts: Sequence[int], work: Work, arrived: float, set_out: int
    ) -> tuple[dict[Lane, float], dict[Lane, float]]:
        """What a `Placement` takes and what was expected, of n streamed experts and j residents."""
        cost, rows, own = self._base[work], sum(counts), [counts[expert] for expert in cpu]
        used, tokens = n + j + len(cpu), rows / self.kind.top_k
        left = sum(_on_cpu(own, cost)) + cost.cpu_call + cost.cross * tokens
        gpu = (rows - sum(own)) * cost.gpu_row + (n + j) * cost.gpu_expert + cost.gpu_call
        now = _lanes(n, j, used, left, gpu, min(n, arrived), tokens, cost)
        after = _lanes(n, j, used, left, gpu, set_out, tokens, cost)
        corrected = map(mul, now, self.corrections(work).values())
        return dict(zip(Lane, corrected, strict=True)), dict(zip(Lane, after, strict=True))

    def _cuts(self, streamed: list[int], stay: list[int], work: Work, arrived: float) -> tuple[int, int]:
        """How many to stream, and how many residents run on the GPU, of experts with these rows."""
        if work == Work.BOTH:
            cost = Costs(*map(add, *map(self._corrected, PASSES)))
            arrived /= 2  # what is there now spares one of two copies
        else:
            cost = self._corrected(work)
        tokens = (sum(streamed) + sum(stay)) / self.kind.top_k
        best, (cpu, copy, gpu) = _soonest(streamed, stay, tokens, cost, arrived)
        if not stay or gpu <= max(cpu, copy):
            return best, len(stay)
        return _fewer_residents(streamed, stay, tokens, cost, arrived)

    def observe(self, work: Work, placement: Placement, seconds: Mapping[Lane, float]) -> None:
        """Correct the rates by what a layer took.

        May come any time after `decide`, for many layers at once: corrections are means, not steps from the last one.

        Args:
            seconds: by lane, for those that were measured: `cpu` from hidden states' leaving the GPU until the sum
                is back; `copy` from the first copy's start until the last expert that was copied is multiplied too, so
                that the pipeline's end counts; `gpu` the time that kernels for experts, residents' too, were running.
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

    def corrections(self, work: Work) -> dict[Lane, float]:
        """By how much each lane's seconds are more than the rates say."""
        return {lane: math.exp(off) for lane, off in self._off[work].items()}


@cache
def _alike(rows: int) -> int:
    """A number that orders experts by rows, and is equal for about as many: those go by expert number then.

    Neighbours lie beside each other in memory, and travel in one copy instead of one each.
    """
    return 1 + math.ceil(math.log(rows) / _STEP) if rows else 0


def _on_cpu(rows: list[int], cost: Costs) -> list[float]:
    """The CPU's seconds for each of these."""
    row, expert = cost.cpu_row, cost.cpu_expert
    few = int(expert / row)  # Python compares whole numbers sooner
    return [each * row if each > few else expert for each in rows]


def _soonest(
    streamed: list[int], stay: list[int], tokens: float, cost: Costs, arrived: float
) -> tuple[int, tuple[float, float, float]]:
    """How many to stream while residents stay, so that the slowest lane is done soonest, or all or none if that is
    nearly as good; and the lanes' seconds.

    With every expert more the CPU has less to do, the others more: best is where they meet, one before, or all, for
    then no hidden states cross.
    """
    size, j = len(streamed), len(stay)
    on_cpu = list(accumulate(_on_cpu(streamed, cost), initial=0.0))
    rows = list(accumulate(streamed, initial=sum(stay)))
    cpu = on_cpu[-1] + cost.cpu_call + cost.cross * tokens

    def lanes(n: int) -> tuple[float, float, float]:
        gpu = rows[n] * cost.gpu_row + (n + j) * cost.gpu_expert + cost.gpu_call
        return _lanes(n, j, size + j, cpu - on_cpu[n], gpu, min(n, arrived), tokens, cost)

    def met(n: int) -> bool:
        cpu, copy, gpu = lanes(n)
        return cpu <= copy or cpu <= gpu

    meet = bisect_left(range(size), True, key=met)
    times = {n: lanes(n) for n in (max(meet - 1, 0), meet, 0, size)}
    best = min(times, key=lambda n: max(times[n]))
    enough = max(times[best]) * (1 + _WORTH)
    best = next((n for n in (size, 0) if max(times[n]) <= enough), best)
    return best, times[best]


class _Group:
    """Experts that may go to the GPU in the same way, most rows first: sums over the first n of them, n = 0 ... all."""

    def __init__(self, rows: list[int], cost: Costs) -> None:
        self.n = np.arange(len(rows) + 1)
        self.cpu = np.array([0.0, *accumulate(_on_cpu(rows, cost))])
        self.gpu = np.array([0.0, *accumulate([each * cost.gpu_row + cost.gpu_expert for each in rows])])


def _fewer_residents(
    streamed: list[int], stay: list[int], tokens: float, cost: Costs, arrived: float
) -> tuple[int, int]:
    """How many to stream and how many residents run on the GPU, so that the slowest lane is done soonest.

    With every resident more the CPU has less to do, the others more: best is where they meet, one before, or all.
    """
    some, here, every = _Group(streamed, cost), _Group(stay, cost), len(stay)
    n, there, used = some.n, np.minimum(some.n, arrived), len(streamed) + every
    both = some.cpu[-1] + here.cpu[-1]
    left = both - some.cpu + (cost.cpu_call + cost.cross * tokens)
    copy = n * cost.copy_expert - there * (cost.copy_expert - cost.copy_resident)
    copy += cost.copy_call + cost.cross_in * tokens
    meet_gpu = (here.cpu + here.gpu).searchsorted(left - (some.gpu + cost.gpu_call))
    meet_copy = (here.cpu + here.n * cost.copy_resident).searchsorted(left - copy)
    meet = np.minimum(np.minimum(meet_gpu, meet_copy), every)
    j = np.stack([np.full_like(n, every), meet, np.maximum(meet - 1, 0)])
    cpu = both + cost.cpu_call + cost.cross * tokens - (some.cpu + here.cpu[j])
    times = _lanes(n, j, used, cpu, some.gpu + here.gpu[j] + cost.gpu_call, there, tokens, cost)
    best = int(np.maximum.reduce(times).argmin())
    return best % len(n), int(j.flat[best])


def _lanes(
    n: Number, j: Number, used: int, cpu: Number, gpu: Number, there: Number, tokens: float, cost: Costs
) -> tuple[Number, Number, Number]:
    """Seconds of each `Lane` for n streamed experts, of whose packed bytes so many are there, and j residents, of those
    used; the CPU and the GPU take these where they have any.
    """
    on_gpu = n + j
    on_cpu = on_gpu < used
    travel = n * cost.copy_expert + j * cost.copy_resident - there * (cost.copy_expert - cost.copy_resident)
    copy = travel + (travel > 0) * cost.copy_call + on_cpu * (cost.cross_in * tokens)
    return cpu * on_cpu, copy, gpu * (on_gpu > 0)
