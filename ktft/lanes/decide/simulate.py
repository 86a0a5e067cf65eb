"""Predicts what layers' experts take on a described machine, with the placement that `Placer` would decide."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ktft.lanes.decide.costs import BF16, LayerKind, Rate, Rates, costs
from ktft.lanes.decide.placer import Coming, Placement, Placer
from ktft.lanes.terms import PASSES, Lane, Mode, Where, Work

ROUTINGS = ("uniform", "zipf")
# The share of the GPU's dense bf16 FLOP/s that grouped products reach, beside reading their weights, and the share of
# its memory's rate that decoding reaches. Qwen3-30B-A3B's gate and up take 0.26, 0.43 and 1.25 ms at 512, 4096 and
# 16384 tokens on an H200.
PRODUCT_SHARE, MEMORY_SHARE = 0.75, 0.6
# Products of a row, relative to forward's (backward computes gate and up again); how often decoded bf16 weights are
# read; and bytes a row that gathering, SwiGLU and summing move for each element of the hidden and intermediate sizes.
_PRODUCTS = {Work.FORWARD: 1.0, Work.BACKWARD: 5 / 3}
_READS = {Work.FORWARD: 1.0, Work.BACKWARD: 5 / 3}
_ROW_BYTES = {Work.FORWARD: (14, 12), Work.BACKWARD: (30, 30)}
_DRAWS = 4  # how many layers draw counts of their own
# Seconds of a call that computes nothing: Python and waking threads; some tens of kernel launches and their events.
_CPU_CALL, _COPY_CALL, _GPU_CALL = 1e-4, 5e-5, {Work.FORWARD: 3e-4, Work.BACKWARD: 6e-4}


@dataclass(frozen=True)
class Hardware:
    """What is known about a machine: FLOP/s, and bytes/s of memories."""

    cpu_forward: float  # of base products
    cpu_backward: float  # likewise, with all that is computed again
    cpu_bandwidth: float
    pcie: float  # bytes/s of pinned copies, in each direction
    gpu_flops: float  # dense bf16
    gpu_bandwidth: float

    def rates(self, kind: LayerKind, *, retained: bool = False) -> Rates:
        """The lanes' rates. `retained`: forward kept gate and up, so the CPU's backward does not read their weights."""
        reads = 1 if retained else _READS[Work.BACKWARD]
        cpu = {
            Work.FORWARD: Rate(self.cpu_forward, self.cpu_bandwidth, _CPU_CALL),
            Work.BACKWARD: Rate(self.cpu_backward, self.cpu_bandwidth / reads, _CPU_CALL),
        }
        return Rates(cpu, {work: self._gpu(kind, work) for work in PASSES}, self.pcie, self.pcie, _COPY_CALL)

    def _gpu(self, kind: LayerKind, work: Work) -> Rate:
        memory = self.gpu_bandwidth * MEMORY_SHARE
        hidden, inner = _ROW_BYTES[work]
        row = _PRODUCTS[work] * kind.row_flops / (self.gpu_flops * PRODUCT_SHARE)
        row += (hidden * kind.hidden_size + inner * kind.intermediate_size) / memory
        weights = kind.projections * kind.hidden_size * kind.intermediate_size * BF16
        expert = (kind.expert_bytes + weights * (1 + _READS[work])) / memory
        return Rate(kind.row_flops / row, kind.expert_bytes / expert, _GPU_CALL[work])


@dataclass(frozen=True)
class Around:
    """What happens around the experts of a layer.

    Attributes:
        between: seconds from a layer's experts to those of the next, by pass. Copies go on in them.
        launches: the least seconds that experts add, by pass: the host takes as long to start their work.
        steady: the same where all of them run on the GPU.
        beside: seconds of a layer in which PCIe copies other things to the GPU, by pass.
        ahead: how many experts the buffers hold that were copied before their layer's turn.
    """

    between: Mapping[Work, float]
    launches: Mapping[Work, float]
    steady: Mapping[Work, float]
    beside: Mapping[Work, float]
    ahead: int = 0


_NONE = dict.fromkeys(PASSES, 0.0)
_ALONE = Around(_NONE, _NONE, _NONE, _NONE)


@dataclass(frozen=True)
class Simulated:
    """What layers' experts take, in seconds: those by which they make a pass longer than it is without them."""

    forward: float
    backward: float
    between: float  # of both passes, in which only copies go on
    busy: dict[Lane, float]  # seconds that each lane worked
    limiting: dict[Lane, float]  # seconds of the passes in which each lane was the slowest
    rows: dict[Where, float]  # of forward and backward, by where they ran

    @property
    def total(self) -> float:
        return self.forward + self.backward

    @property
    def passes(self) -> float:
        """Seconds of both passes, what lies between the experts included."""
        return self.total + self.between

    @property
    def shares(self) -> dict[Where, float]:
        """The share of all rows that ran in each place."""
        return {where: count / sum(self.rows.values()) for where, count in self.rows.items()}

    @property
    def slowest(self) -> Lane:
        """The lane that the others wait for most of the time."""
        return max(self.limiting, key=lambda lane: self.limiting[lane])


def popularity(kind: LayerKind, routing: str) -> NDArray[np.float64]:
    """The probability that a token is sent to each expert; together `top_k`.

    `zipf` draws `top_k` experts without replacement, expert n with weight 1/n. This is as if every expert had a clock
    that rings after a random time of that rate, and the first `top_k` were chosen. So the probability is
    1 - exp(-t / n), where t is the time by which `top_k` clocks are expected to ring.

    Raises:
        ValueError: the routing is unknown.
    """
    if routing == "uniform":
        return np.full(kind.num_experts, kind.top_k / kind.num_experts)
    if routing != "zipf":
        raise ValueError(f"routing is {routing!r}; known: {', '.join(ROUTINGS)}")
    weights = 1.0 / np.arange(1, kind.num_experts + 1)
    low, high = 0.0, 64.0 * kind.num_experts
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.expm1(-weights * middle).sum() < kind.top_k else (low, middle)
    return -np.expm1(-weights * high)


@lru_cache(maxsize=64)
def draw_counts(kind: LayerKind, tokens: int, routing: str, seed: int = 0) -> tuple[int, ...]:
    """Rows by expert of one micro-batch, drawn from `popularity`; together `tokens * top_k`."""
    share = popularity(kind, routing)
    counts = np.random.default_rng(seed).binomial(tokens, share)
    missing = tokens * kind.top_k - int(counts.sum())
    for expert in np.argsort(-share, kind="stable"):  # independent draws miss the sum
        if not missing:
            break
        more = min(max(int(counts[expert]) + missing, 0), tokens) - int(counts[expert])
        counts[expert], missing = counts[expert] + more, missing - more
    return tuple(counts.tolist())


def simulate(
    kind: LayerKind, rates: Rates, tokens: int, *, layers: int = 1, mode: str = Mode.AUTO, residents: int = 0,
    routing: str = "uniform", retained: bool = False, around: Around = _ALONE,
) -> Simulated:  # fmt: skip
    """One forward and one backward of such layers.

    Args:
        layers: how many there are; up to `_DRAWS` of them draw their own counts, and stand for the others.
        mode: one of `Mode`.
        residents: how many experts of each layer stay on the GPU; they are the most popular ones.
        retained: backward uses what forward kept, so its experts stay where they were.
    """
    placer = Placer(kind, rates, mode)
    resident = range(min(residents, kind.num_experts))  # `popularity` falls with the number
    seconds = dict.fromkeys(PASSES, 0.0)
    busy, limiting = dict.fromkeys(Lane, 0.0), dict.fromkeys(Lane, 0.0)
    rows = dict.fromkeys(Where, 0.0)
    draws = min(layers, _DRAWS)
    for draw in range(draws):
        counts = draw_counts(kind, tokens, routing, seed=draw)
        first = Work.BOTH if retained else Work.FORWARD
        before = placer.decide(counts, resident, first)  # of the batch before, which tells what to copy ahead
        forward = placer.decide(counts, resident, first, coming=_coming(placer, before, Work.FORWARD, around))
        for work in PASSES:
            placed = forward
            if work == Work.BACKWARD:
                before = forward if retained else placer.decide(counts, resident, work)
                coming = _coming(placer, before, work, around)
                placed = (
                    placer.again(forward, counts, work, coming)
                    if retained
                    else placer.decide(counts, resident, work, coming=coming)
                )
            slowest = placed.slowest
            least = around.launches if placed.experts(Where.CPU) else around.steady
            late = max(around.beside[work] - around.between[work], 0.0)
            adds = (max(placed.seconds[slowest], least[work]) + late) * layers / draws
            seconds[work] += adds
            busy[Lane.COPY] += around.beside[work] * layers / draws
            limiting[slowest] += adds
            for lane, worked in placer.again(placed, counts, work).seconds.items():
                busy[lane] += worked * layers / draws
            for where in rows:
                rows[where] += sum(counts[expert] for expert in placed.experts(where)) * layers / draws
    return Simulated(**seconds, between=layers * sum(around.between.values()), busy=busy, limiting=limiting, rows=rows)


def _coming(placer: Placer, before: Placement, work: Work, around: Around) -> Coming:
    """The experts that were copied ahead of a layer's turn."""
    cost = costs(placer.kind, placer.rates, work).copy
    experts = sorted(before.ahead)[: around.ahead]
    idle = max(around.between[work] - around.beside[work], 0.0)
    return Coming(experts, min(idle / (cost.expert - cost.resident), len(experts)))


def joined(parts: Iterable[Simulated]) -> Simulated:
    """The sum over kinds of layers."""
    several = list(parts)
    return Simulated(
        sum(each.forward for each in several),
        sum(each.backward for each in several),
        sum(each.between for each in several),
        {lane: sum(each.busy[lane] for each in several) for lane in Lane},
        {lane: sum(each.limiting[lane] for each in several) for lane in Lane},
        {where: sum(each.rows[where] for each in several) for where in Where},
    )
