"""Where each expert in use runs, decided for every layer and micro-batch: the slowest lane is to be done soonest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, mul
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ktft.config import Settings
from ktft.lanes.rates import LANES, WORKS, Costs, LayerKind, Rates, costs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Number = TypeVar("Number", float, Floats)

# How measured times correct rates: of the logarithm by which a lane is off, this much each time, and no single time
# counts as more than twice off. A layer's neighbours see the same rates, so one step of a model corrects most of it.
_GAIN, _MOST, _LIMIT = 0.15, math.log(2.0), math.log(16.0)
_FADE = 0.002  # of the correction of a lane that was not used or measured: a bad moment does not shut it for ever

# Experts whose rows lie between the same two of these are alike, and go by expert number: neighbours lie beside each
# other in memory, and travel in one copy instead of one each.
_LIMITS = np.ceil(1.5 ** np.arange(64)).astype(np.int64)

_WORTH = 0.02  # what a lane more must gain, for rates are not known better


@dataclass(frozen=True)
class Placement:
    """Experts in use by where they run, most rows first.

    Attributes:
        seconds: that this takes in each of `LANES`.
        expected: what the rates alone expected, before corrections, of copies that had not set out before.
        ahead: experts that are worth being copied before the next such decision.
    """

    cpu: list[int]
    stream: list[int]
    resident: list[int]
    seconds: dict[str, float]
    expected: dict[str, float]
    ahead: list[int] = field(default_factory=list)

    @property
    def slowest(self) -> str:
        """The lane that the others wait for."""
        return max(self.seconds, key=lambda lane: self.seconds[lane])


@dataclass(frozen=True)
class Coming:
    """Experts whose packed bytes set out for the GPU before it was decided where they run, and how many of them are
    there by now; one that is half there counts as half a one.
    """

    experts: Collection[int] = ()
    arrived: float = 0.0

    def among(self, placement: Placement) -> int:
        """How many of them are streamed."""
        streamed = placement.stream
        return len(streamed) + len(self.experts) - len({*streamed, *self.experts}) if self.experts else 0


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


class _Group:
    """Experts that may go to the GPU in the same way, most rows first: sums over the first n of them, n = 0 ... all."""

    def __init__(self, rows: list[int], cost: Costs) -> None:
        self.size = len(rows)
        own = np.array([0, *rows], dtype=np.float64)
        self.cpu, self.gpu = np.maximum(own * cost.cpu_row, cost.cpu_expert), own * cost.gpu_row + cost.gpu_expert
        for each in (self.cpu, self.gpu):
            each[0] = 0.0
            each.cumsum(out=each)


class Placer:
    """Decides for all layers of one kind, and learns from what they took. One a kind of layer.

    Three lanes run at once: the CPU; PCIe; the GPU's decoding and products, which go on while the next experts are
    copied. An expert costs the CPU max(reading its weights, computing its rows): with few rows memory is the limit, and
    rows are free until their products take as long; experts follow each other on each thread, so these maxima add up.
    PCIe takes as long for any expert. So the experts with most rows go to the GPU, and what is left to find is how
    many: a scan over sums.

    Args:
        kind: the layers' shape and format.
        rates: as calibrated or described.
        mode: `auto`, or `cpu`, `stream`, `resident` to force a lane; residents then stay on the GPU except under `cpu`.
    """

    def __init__(self, kind: LayerKind, rates: Rates, mode: str = "auto") -> None:
        self.kind, self.rates, self.mode = kind, rates, mode
        self._base = {work: costs(kind, rates, work) for work in WORKS}
        self._off = {work: dict.fromkeys(LANES, 0.0) for work in WORKS}  # logarithms of measured / predicted

    def decide(
        self,
        counts: Sequence[int],
        resident: Collection[int],
        work: str,
        mode: str | None = None,
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
        alike: list[int] = _LIMITS.searchsorted(counts, side="right").tolist()
        stay: list[int] = []
        if resident:
            stay = sorted([e for e in sorted(resident) if alike[e]], key=counts.__getitem__, reverse=True)
            for expert in stay:
                alike[expert] = 0
        set_out = 0
        for expert in coming.experts:
            if alike[expert]:
                alike[expert] += len(_LIMITS)
                set_out += 1
        streamed = sorted(range(len(alike)), key=alike.__getitem__, reverse=True)[: len(alike) - alike.count(0)]
        best, j = self._cuts(streamed, stay, counts, work, mode or self.mode, coming.arrived)
        n, work = max(best, set_out) if best else 0, "forward" if work == "both" else work
        cpu = streamed[n:] + stay[j:]
        times = self._times(cpu, n, j, counts, work, coming.arrived, set_out if n else 0)
        return Placement(cpu, streamed[:n], stay[:j], *times, ahead=streamed[:best])

    def again(self, placement: Placement, counts: Sequence[int], work: str, coming: Coming = _NOTHING) -> Placement:
        """The same experts in the same lanes, with the seconds of other work, or of other experts on their way."""
        cpu, stream, resident = placement.cpu, placement.stream, placement.resident
        set_out = coming.among(placement)
        times = self._times(cpu, len(stream), len(resident), counts, work, coming.arrived, set_out)
        return Placement(cpu, stream, resident, *times, ahead=placement.ahead)

    def _times(
        self, cpu: list[int], n: int, j: int, counts: Sequence[int], work: str, arrived: float, set_out: int
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of `LANES`, as they are and as `Placement.expected`: of the CPU's experts, n streamed, j residents."""
        cost, rows = self._base[work], sum(counts)
        own = [counts[expert] for expert in cpu]
        many = [each for each in own if each * cost.cpu_row > cost.cpu_expert]
        left = sum(many) * cost.cpu_row + (len(own) - len(many)) * cost.cpu_expert
        gpu = (rows - sum(own)) * cost.gpu_row + (n + j) * cost.gpu_expert
        now, after = (
            _lanes(n, j, len(cpu) + n + j, left, gpu, min(n, there), rows / self.kind.top_k, cost)
            for there in (arrived, set_out)
        )
        corrected = map(mul, now, self.corrections(work).values())
        return dict(zip(LANES, corrected, strict=True)), dict(zip(LANES, after, strict=True))

    def _cuts(
        self, streamed: list[int], stay: list[int], counts: Sequence[int], work: str, mode: str, arrived: float
    ) -> tuple[int, int]:
        """How many to stream, and how many residents run on the GPU."""
        if mode != "auto":
            return len(streamed) if mode == "stream" else 0, 0 if mode == "cpu" else len(stay)
        if work == "both":  # what is there now spares one of two copies
            cost, arrived = Costs(*map(add, *map(self._corrected, WORKS))), arrived / 2
        else:
            cost = self._corrected(work)
        groups = [_Group([counts[expert] for expert in each], cost) for each in (streamed, stay)]
        tokens = sum(counts) / self.kind.top_k
        best, seconds = _soonest(_cut(*groups, np.array([len(stay)]), tokens, cost, arrived))
        if not stay or seconds[2] <= max(seconds[:2]):
            return best, len(stay)
        j = _fewer_residents(*groups, tokens, cost, arrived)
        best, _ = _soonest(_cut(*groups, j, tokens, cost, arrived))
        return best % (len(streamed) + 1), int(j.flat[best])

    def _corrected(self, work: str) -> Costs:
        return self._base[work].corrected(**self.corrections(work))

    def observe(self, work: str, placement: Placement, seconds: Mapping[str, float]) -> None:
        """Correct the rates by what a layer took.

        May come any time after `decide`, for many layers at once: corrections are means, not steps from the last one.

        Args:
            seconds: by `LANES`, for those that were measured: `cpu` from hidden states' leaving the GPU until the sum
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

    def corrections(self, work: str) -> dict[str, float]:
        """By how much each lane's seconds are more than the rates say."""
        return {lane: math.exp(off) for lane, off in self._off[work].items()}


def _soonest(times: tuple[Floats, ...]) -> tuple[int, list[float]]:
    """The first place where the slowest lane is done soonest, or the last or first if it is nearly as good; and the
    lanes' seconds there.
    """
    slowest = np.maximum(np.maximum(times[0], times[1]), times[2])
    best = int(slowest.argmin())
    enough = slowest.flat[best] * (1 + _WORTH)
    if slowest.ndim == 1:
        best = len(slowest) - 1 if slowest[-1] <= enough else 0 if slowest[0] <= enough else best
    return best, [float(time.flat[best]) for time in times]


def _fewer_residents(streamed: _Group, stay: _Group, tokens: float, cost: Costs, arrived: float) -> Ints:
    """For every n streamed experts, numbers [3, n] of residents on the GPU of which one is best.

    With every resident more the CPU has less to do, the others more: best is where they meet, one before, or all.
    """
    n = np.arange(streamed.size + 1)
    cpu = streamed.cpu[-1] + stay.cpu[-1] - streamed.cpu + (cost.cpu_call + cost.cross * tokens)
    copy = _travel(n, 0, np.minimum(n, arrived), cost) + (cost.copy_call + cost.cross_in * tokens)
    meet = np.minimum(
        (stay.cpu + stay.gpu).searchsorted(cpu - (streamed.gpu + cost.gpu_call)),
        (stay.cpu + np.arange(stay.size + 1) * cost.copy_resident).searchsorted(cpu - copy),
    )
    meet = np.minimum(meet, stay.size)
    return np.stack([np.full_like(n, stay.size), meet, np.maximum(meet - 1, 0)])


def _cut(
    streamed: _Group, stay: _Group, j: Ints, tokens: float, cost: Costs, arrived: float
) -> tuple[Floats, Floats, Floats]:
    """Seconds of `LANES` for every n streamed experts, and the first j residents on the GPU."""
    n = np.arange(streamed.size + 1.0)
    left = streamed.cpu[-1] + stay.cpu[-1] - streamed.cpu - stay.cpu[j]
    gpu = streamed.gpu + stay.gpu[j]
    return _lanes(n, j.astype(np.float64), streamed.size + stay.size, left, gpu, np.minimum(n, arrived), tokens, cost)


def _lanes(
    n: Number, j: Number, used: int, left: Number, gpu: Number, there: Number, tokens: float, cost: Costs
) -> tuple[Number, Number, Number]:
    """Seconds of `LANES` for n streamed experts, of whose packed bytes so many are there, and j residents.

    Args:
        used: experts, on the CPU too.
        left: seconds of the CPU's experts alone.
        gpu: seconds of the GPU's experts alone.
    """
    both = n + j
    on_cpu = both < used
    travel = _travel(n, j, there, cost)
    return (
        (left + (cost.cpu_call + cost.cross * tokens)) * on_cpu,
        travel + (travel > 0) * cost.copy_call + on_cpu * (cost.cross_in * tokens),
        (gpu + cost.gpu_call) * (both > 0),
    )


def _travel(n: Number, j: Number, there: Number, cost: Costs) -> Number:
    """Seconds of the copies alone."""
    return n * cost.copy_expert + j * cost.copy_resident - there * (cost.copy_expert - cost.copy_resident)
