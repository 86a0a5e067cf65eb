"""Where each expert in use runs, decided for every layer and micro-batch: the slowest lane is to be done soonest."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
        return len(set(placement.stream).intersection(self.experts)) if self.experts else 0


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
        rows, cost = np.array(counts, dtype=np.float64), self._costs[work]
        used = np.count_nonzero(rows)
        streamed = np.argsort(-_alike(rows), kind="stable")[:used]
        stay = streamed[:0]
        if resident:
            here = _among(resident, len(rows))
            by_rows = np.argsort(-rows, kind="stable")[:used]
            streamed, stay = streamed[~here[streamed]], by_rows[here[by_rows]]
        set_out = 0
        if coming.experts:
            on_way = _among(coming.experts, len(rows))[streamed]
            streamed, set_out = np.concatenate([streamed[on_way], streamed[~on_way]]), int(on_way.sum())
        groups, tokens = (_Group(streamed, rows, cost), _Group(stay, rows, cost)), float(rows.sum()) / self.kind.top_k
        # What is there now spares `both` one of two copies
        arrived = coming.arrived / (2 if work == "both" else 1)
        best, j = self._cuts(*groups, tokens, cost, mode or self.mode, arrived)
        on_gpu, stays, n = streamed.tolist(), stay.tolist(), max(best, set_out) if best else 0
        placement = Placement(on_gpu[n:] + stays[j:], on_gpu[:n], stays[:j], {}, {}, ahead=on_gpu[:best])
        if work == "both":
            return self.again(placement, counts, "forward", coming)
        return self._timed(placement, *groups, tokens, work, coming)

    def again(self, placement: Placement, counts: Sequence[int], work: str, coming: Coming = _NOTHING) -> Placement:
        """The same experts in the same lanes, with the seconds of other work, or of other experts on their way."""
        rows, cost = np.array(counts, dtype=np.float64), self._costs[work]
        streamed = _Group(np.array(placement.stream + placement.cpu, dtype=np.int64), rows, cost)
        stay = _Group(np.array(placement.resident, dtype=np.int64), rows, cost)
        return self._timed(placement, streamed, stay, float(rows.sum()) / self.kind.top_k, work, coming)

    def _timed(
        self, placement: Placement, streamed: _Group, stay: _Group, tokens: float, work: str, coming: Coming
    ) -> Placement:
        """With what it takes."""
        set_out = coming.among(placement)
        n, j = np.full(2, len(placement.stream)), np.full(2, len(placement.resident))
        times = _lanes(streamed, stay, n, j, tokens, self._costs[work], np.array([coming.arrived, set_out]))
        now, after = (dict(zip(LANES, each, strict=True)) for each in np.stack(times, 1).tolist())
        expected = {lane: each / math.exp(self._off[work][lane]) for lane, each in after.items()}
        return replace(placement, seconds=now, expected=expected)

    def _cuts(
        self, streamed: _Group, stay: _Group, tokens: float, cost: Costs, mode: str, arrived: float
    ) -> tuple[int, int]:
        """How many to stream, and how many residents run on the GPU."""
        n, every = np.arange(streamed.size + 1), np.array([stay.size])
        if mode != "auto":
            return streamed.size if mode == "stream" else 0, 0 if mode == "cpu" else stay.size
        best, seconds = _soonest(_lanes(streamed, stay, n, every, tokens, cost, arrived))
        if not stay.size or seconds[2] <= max(seconds[:2]):
            return best, stay.size
        j = _fewer_residents(streamed, stay, n, tokens, cost, arrived)
        best, _ = _soonest(_lanes(streamed, stay, n, j, tokens, cost, arrived))
        return best % len(n), int(j.flat[best])

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


def _among(experts: Collection[int], num_experts: int) -> NDArray[np.bool_]:
    """Which expert numbers are among these."""
    found = np.zeros(num_experts, dtype=bool)
    found[list(experts)] = True
    return found


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


def _fewer_residents(streamed: _Group, stay: _Group, n: Ints, tokens: float, cost: Costs, arrived: float) -> Ints:
    """For every n streamed experts, numbers [3, n] of residents on the GPU of which one is best.

    With every resident more the CPU has less to do, the others more: best is where they meet, one before, or all.
    """
    cpu = streamed.cpu_all + stay.cpu_all - streamed.cpu + (cost.cpu_call + cost.cross * tokens)
    copy = _travel(n, 0, cost, arrived) + (cost.copy_call + cost.cross_in * tokens)
    meet = np.minimum(
        (stay.cpu + stay.gpu).searchsorted(cpu - (streamed.gpu + cost.gpu_call)),
        (stay.cpu + np.arange(stay.size + 1) * cost.copy_resident).searchsorted(cpu - copy),
    )
    meet = np.minimum(meet, stay.size)
    return np.stack([np.full_like(n, stay.size), meet, np.maximum(meet - 1, 0)])


def _travel(n: Ints, j: Ints | int, cost: Costs, arrived: float | Floats) -> Floats:
    """Seconds of copies for n streamed experts, of whose packed bytes so many are there, and j residents."""
    return (
        n * cost.copy_expert + j * cost.copy_resident - np.minimum(n, arrived) * (cost.copy_expert - cost.copy_resident)
    )


def _lanes(
    streamed: _Group, stay: _Group, n: Ints, j: Ints, tokens: float, cost: Costs, arrived: float | Floats
) -> tuple[Floats, ...]:
    """Seconds of `LANES` when the first n and j of these are on the GPU and all others on the CPU."""
    both = n + j
    on_cpu, on_gpu = both < streamed.size + stay.size, both > 0
    cpu = (streamed.cpu_all + stay.cpu_all + cost.cpu_call + cost.cross * tokens) - (streamed.cpu[n] + stay.cpu[j])
    travel = _travel(n, j, cost, arrived)
    copy = travel + (travel > 0) * cost.copy_call + on_cpu * (cost.cross_in * tokens)
    gpu = streamed.gpu[n] + stay.gpu[j] + cost.gpu_call
    return cpu * on_cpu, copy, gpu * on_gpu
