"""Where each expert in use runs, decided for every layer and micro-batch: the slowest lane is to be done soonest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ktft.config import Settings
from ktft.lanes.rates import LANES, WORKS, Costs, LayerKind, Rates, costs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# How measured times correct rates: of the logarithm by which a lane is off, this much each time, and no single time
# counts as more than twice off. A layer's neighbours see the same rates, so one step of a model corrects most of it.
_GAIN, _MOST, _LIMIT = 0.15, math.log(2.0), math.log(16.0)
_STEP = math.log(1.5)  # experts whose rows differ by less are alike
_FADE = 0.002  # of the correction of a lane that was not used or measured: a bad moment does not shut it for ever

_WORTH = 0.02  # what a lane more must gain, for rates are not known better


@dataclass(frozen=True)
class Placement:
    """Experts in use by where they run, most rows first; the seconds that this takes in each of `LANES`, and what the
    rates alone expected, before corrections.
    """

    cpu: list[int]
    stream: list[int]
    resident: list[int]
    seconds: dict[str, float]
    expected: dict[str, float]

    @property
    def slowest(self) -> str:
        """The lane that the others wait for."""
        return max(self.seconds, key=lambda lane: self.seconds[lane])


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


class _Group:
    """Experts that may go to the GPU in the same way, most rows first: sums over the first n of them, n = 0 ... all."""

    def __init__(self, experts: Ints, rows: Floats, cost: Costs) -> None:
        self.experts, self.size = experts, len(experts)
        own = rows[experts]
        self.cpu, self.gpu = np.zeros(self.size + 1), np.zeros(self.size + 1)
        if self.size:
            np.maximum(own * cost.cpu_row, cost.cpu_expert).cumsum(out=self.cpu[1:])
            (own * cost.gpu_row + cost.gpu_expert).cumsum(out=self.gpu[1:])
        self.cpu_all = float(self.cpu[-1])


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
        self._correct()

    def _correct(self) -> None:
        self._costs = {work: self._base[work].corrected(**self.corrections(work)) for work in WORKS}
        self._costs["both"] = Costs(*map(sum, zip(*self._costs.values(), strict=True)))

    def decide(self, counts: Sequence[int], resident: Collection[int], work: str, mode: str | None = None) -> Placement:
        """Where the experts run that `counts` (rows an expert) gives rows.

        Args:
            resident: experts whose weights are on the GPU. They run there, unless that makes the GPU the slowest lane:
                then those with fewest rows go to the CPU.
            work: `forward` or `backward`; or `both`, for a forward whose backward needs what each lane retained: the
                seconds are then forward's, and `again` gives backward's.
            mode: instead of the placer's own.

        A lane is left out where it would gain less than 2%. Equal counts give equal decisions: experts with about as
        many rows go by their number.
        """
        rows, cost = np.array(counts, dtype=np.float64), self._costs[work]
        used = np.count_nonzero(rows)
        streamed = np.argsort(-_alike(rows), kind="stable")[:used]
        stay = streamed[:0]
        if resident:
            here = np.zeros(len(rows), dtype=bool)
            here[list(resident)] = True
            by_rows = np.argsort(-rows, kind="stable")[:used]
            streamed, stay = streamed[~here[streamed]], by_rows[here[by_rows]]
        groups = _Group(streamed, rows, cost), _Group(stay, rows, cost)
        n, j, seconds = self._cuts(*groups, float(rows.sum()) / self.kind.top_k, cost, mode or self.mode)
        on_gpu, stays = streamed.tolist(), stay.tolist()
        lists = on_gpu[n:] + stays[j:], on_gpu[:n], stays[:j]
        if work == "both":
            return self.again(Placement(*lists, {}, {}), counts, "forward")
        return self._placement(work, *lists, seconds)

    def again(self, placement: Placement, counts: Sequence[int], work: str) -> Placement:
        """The same experts in the same lanes, with the seconds of other work."""
        rows, n, j = np.array(counts, dtype=np.float64), len(placement.stream), len(placement.resident)
        streamed = _Group(np.array(placement.stream + placement.cpu, dtype=np.int64), rows, self._costs[work])
        stay = _Group(np.array(placement.resident, dtype=np.int64), rows, self._costs[work])
        tokens = float(rows.sum()) / self.kind.top_k
        times = _lanes(streamed, stay, np.array([n]), np.array([j]), tokens, self._costs[work])
        seconds = [float(time[0]) for time in times]
        return self._placement(work, placement.cpu, placement.stream, placement.resident, seconds)

    def _placement(
        self, work: str, cpu: list[int], stream: list[int], resident: list[int], seconds: list[float]
    ) -> Placement:
        off = self._off[work]
        corrected = dict(zip(LANES, seconds, strict=True))
        expected = {lane: each / math.exp(off[lane]) for lane, each in corrected.items()}
        return Placement(cpu, stream, resident, corrected, expected)

    def _cuts(
        self, streamed: _Group, stay: _Group, tokens: float, cost: Costs, mode: str
    ) -> tuple[int, int, list[float]]:
        """How many to stream, how many residents run on the GPU, and the lanes' seconds then."""
        n, every = np.arange(streamed.size + 1), np.array([stay.size])
        if mode != "auto":
            n = np.array([streamed.size if mode == "stream" else 0])
            every = np.array([0 if mode == "cpu" else stay.size])
        best, seconds = _soonest(_lanes(streamed, stay, n, every, tokens, cost))
        if mode != "auto" or not stay.size or seconds[2] <= max(seconds[:2]):
            return int(n[best]), int(every[0]), seconds
        j = _fewer_residents(streamed, stay, n, tokens, cost)
        best, seconds = _soonest(_lanes(streamed, stay, n, j, tokens, cost))
        return best % len(n), int(j.flat[best]), seconds

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
        self._correct()

    def corrections(self, work: str) -> dict[str, float]:
        """By how much each lane's seconds are more than the rates say."""
        return {lane: math.exp(off) for lane, off in self._off[work].items()}


def _alike(rows: Floats) -> Floats:
    """Numbers that order experts by rows, and are equal for about as many: those go by expert number then.

    Neighbours lie beside each other in memory, and travel in one copy instead of one each.
    """
    return np.ceil(np.log(np.maximum(rows, 0.5)) / _STEP)


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


def _fewer_residents(streamed: _Group, stay: _Group, n: Ints, tokens: float, cost: Costs) -> Ints:
    """For every n streamed experts, numbers [3, n] of residents on the GPU of which one is best.

    With every resident more the CPU has less to do, the others more: best is where they meet, one before, or all.
    """
    cpu = streamed.cpu_all + stay.cpu_all - streamed.cpu + (cost.cpu_call + cost.cross * tokens)
    copy = n * cost.copy_expert + (cost.copy_call + cost.cross_in * tokens)
    meet = np.minimum(
        (stay.cpu + stay.gpu).searchsorted(cpu - (streamed.gpu + cost.gpu_call)),
        (stay.cpu + np.arange(stay.size + 1) * cost.copy_resident).searchsorted(cpu - copy),
    )
    meet = np.minimum(meet, stay.size)
    return np.stack([np.full_like(n, stay.size), meet, np.maximum(meet - 1, 0)])


def _lanes(streamed: _Group, stay: _Group, n: Ints, j: Ints, tokens: float, cost: Costs) -> tuple[Floats, ...]:
    """Seconds of `LANES` when the first n and j of these are on the GPU and all others on the CPU."""
    both = n + j
    on_cpu, on_gpu = both < streamed.size + stay.size, both > 0
    cpu = (streamed.cpu_all + stay.cpu_all + cost.cpu_call + cost.cross * tokens) - (streamed.cpu[n] + stay.cpu[j])
    travel = n * cost.copy_expert + j * cost.copy_resident
    copy = travel + (travel > 0) * cost.copy_call + on_cpu * (cost.cross_in * tokens)
    gpu = streamed.gpu[n] + stay.gpu[j] + cost.gpu_call
    return cpu * on_cpu, copy, gpu * on_gpu
