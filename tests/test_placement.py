"""Where experts run: decisions beside brute force, forced lanes, ties, and rates that are corrected while running."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ktft.config import Settings
from ktft.lanes.decide.costs import Costs, LayerKind, Rate, Rates, costs
from ktft.lanes.decide.placer import Coming, Placement, Placer, usable_placement
from ktft.lanes.terms import PASSES, Lane

KIND = LayerKind(128, 8, 2048, 768, 4_790_000, 3 * 8 * 2816)
RATES = Rates(
    cpu={"forward": Rate(12.9e12, 76e9, 1e-4), "backward": Rate(7e12, 46e9, 1e-4)},
    gpu={"forward": Rate(365e12, 580e9, 3e-4), "backward": Rate(190e12, 580e9, 6e-4)},
    copy_in=54e9,
    copy_out=54e9,
    copy_call=5e-5,
)


def lanes(cost: Costs, kind: LayerKind, counts: Sequence[int], placed: tuple[list[int], list[int], list[int]]) -> dict:
    """The cost model in plain words, expert by expert."""
    cpu, stream, resident = placed
    tokens, on_gpu = sum(counts) / kind.top_k, [*stream, *resident]
    travel = len(stream) * cost.copy.expert + len(resident) * cost.copy.resident
    return {
        "cpu": sum(max(cost.cpu.expert, counts[e] * cost.cpu.row) for e in cpu)
        + (cost.cpu.call + tokens * cost.cpu.cross if cpu else 0),
        "copy": travel + (cost.copy.call if travel else 0) + (tokens * cost.copy.cross if cpu else 0),
        "gpu": sum(cost.gpu.expert + counts[e] * cost.gpu.row for e in on_gpu) + (cost.gpu.call if on_gpu else 0),
    }


def of(placed: Placement) -> tuple[list[int], list[int], list[int]]:
    return placed.cpu, placed.stream, placed.resident


def brute_force(cost: Costs, kind: LayerKind, counts: list[int], resident: set[int]) -> float:
    """The soonest of all assignments of experts in use to the CPU and the GPU."""
    used = [e for e, rows in enumerate(counts) if rows]
    best = math.inf
    for on_gpu in product((False, True), repeat=len(used)):
        cpu = [e for e, there in zip(used, on_gpu, strict=True) if not there]
        gpu = [e for e, there in zip(used, on_gpu, strict=True) if there]
        split = cpu, [e for e in gpu if e not in resident], [e for e in gpu if e in resident]
        best = min(best, max(lanes(cost, kind, counts, split).values()))
    return best


def random_case(seed: int) -> tuple[LayerKind, Rates, list[int], set[int]]:
    rng = np.random.default_rng(seed)
    kind = replace(KIND, num_experts=9, lora_parameters=int(rng.choice([0, KIND.lora_parameters])))
    cpu, gpu, copy = (float(10 ** rng.uniform(-1, 1)) for _ in range(3))
    rates = Rates(
        {w: Rate(r.flops * cpu, r.reading * cpu, r.call) for w, r in RATES.cpu.items()},
        # down to 1/1000: some GPUs are the slowest lane
        {w: Rate(r.flops * gpu / 100, r.reading * gpu / 100, r.call) for w, r in RATES.gpu.items()},
        RATES.copy_in * copy,
        RATES.copy_out * copy,
        RATES.copy_call,
    )
    counts = [int(rows) for rows in rng.integers(0, int(10 ** rng.uniform(0.5, 4)), 9)]
    return kind, rates, counts, set(rng.permutation(9)[: rng.integers(0, 7)].tolist())


@pytest.mark.parametrize("work", PASSES)
def test_decisions_beside_brute_force(work: str) -> None:
    exact, moved = 0, 0
    for seed in range(60):
        kind, rates, counts, resident = random_case(seed)
        cost = costs(kind, rates, work)
        placed = Placer(kind, rates).decide(counts, resident, work)
        used = [e for e, rows in enumerate(counts) if rows]
        assert sorted(placed.cpu + placed.stream + placed.resident) == used
        assert set(placed.resident) <= resident
        assert not resident & set(placed.stream)
        assert placed.seconds == pytest.approx(lanes(cost, kind, counts, of(placed)))
        taken, best = max(placed.seconds.values()), brute_force(cost, kind, counts, resident)
        # sets that are not "the first n" may fit together better, by less than what one expert takes
        one = max(max(cost.cpu.expert, counts[e] * cost.cpu.row) for e in used)
        assert best * (1 - 1e-9) <= taken <= best * 1.02 + one
        exact += taken <= best * 1.03
        moved += bool(resident & set(placed.cpu))
    assert exact >= 45
    assert moved >= 3  # residents went to the CPU in some


def _class(rows: int) -> int:
    """Experts of one class differ by less than half and go by their number."""
    return math.ceil(math.log(rows) / math.log(1.5))


@pytest.mark.parametrize("work", PASSES)
def test_without_residents_no_other_cut_is_better(work: str) -> None:
    for seed in range(40):
        kind, rates, counts, _ = random_case(seed)
        cost, placed = costs(kind, rates, work), Placer(kind, rates).decide(counts, (), work)
        used = sorted((e for e, rows in enumerate(counts) if rows), key=lambda e: (-_class(counts[e]), e))
        cuts = [max(lanes(cost, kind, counts, (used[n:], used[:n], [])).values()) for n in range(len(used) + 1)]
        near = [n for n in (len(used), 0) if cuts[n] <= 1.02 * min(cuts)]
        assert len(placed.stream) == (near[0] if near else cuts.index(min(cuts)))
        assert placed.stream == used[: len(placed.stream)]


def test_a_weak_gpu_leaves_residents_with_fewest_rows_to_the_cpu() -> None:
    kind = replace(KIND, num_experts=16)
    weak = replace(RATES, gpu={work: Rate(6e12, 580e9, 3e-4) for work in PASSES})
    counts = [100 * (e + 1) for e in range(16)]
    placed = Placer(kind, weak).decide(counts, range(16), "forward")
    assert placed.cpu and placed.resident
    assert max(placed.cpu) < min(placed.resident)
    assert not set(range(4)) & set(Placer(kind, RATES).decide(counts, range(4), "forward").cpu)


def test_forced_lanes() -> None:
    counts = [(e * 37) % 50 for e in range(128)]
    used, resident = [e for e in range(128) if counts[e]], {1, 2, 3, 50}
    for mode, expected in {
        "cpu": (used, [], []),
        "stream": ([], sorted(set(used) - resident), sorted(set(used) & resident)),
        "resident": (sorted(set(used) - resident), [], sorted(set(used) & resident)),
    }.items():
        placed = Placer(KIND, RATES, mode).decide(counts, resident, "forward")
        assert tuple(map(sorted, of(placed))) == expected
    auto = Placer(KIND, RATES).decide(counts, resident, "forward")
    for mode in ("cpu", "stream", "resident"):
        forced = Placer(KIND, RATES, mode).decide(counts, resident, "forward")
        assert max(auto.seconds.values()) <= max(forced.seconds.values())


def test_a_placement_again_for_other_work() -> None:
    counts = [(e * 37) % 50 for e in range(128)]
    placer = Placer(KIND, RATES)
    forward = placer.decide(counts, {1, 2}, "forward")
    backward = placer.again(forward, counts, "backward")
    assert of(backward) == of(forward)
    assert backward.seconds == pytest.approx(lanes(costs(KIND, RATES, "backward"), KIND, counts, of(forward)))
    assert placer.again(backward, counts, "forward") == forward
    both = placer.decide(counts, {1, 2}, "both")
    assert both == placer.again(both, counts, "forward")
    alone = [len(placer.decide(counts, {1, 2}, work).cpu) for work in PASSES]
    assert min(alone) <= len(both.cpu) <= max(alone)
    placer.observe("backward", backward, {"cpu": 2 * backward.seconds["cpu"]})
    later = placer.again(forward, counts, "backward")
    assert later.seconds["cpu"] > backward.seconds["cpu"]
    assert later.expected == pytest.approx(backward.expected)


def test_experts_on_their_way_run_on_the_gpu_and_what_is_there_costs_no_copy() -> None:
    placer, cost = Placer(KIND, RATES), costs(KIND, RATES, "forward")
    counts = [256] * 128
    usual = placer.decide(counts, (), "forward")
    there = placer.decide(counts, (), "forward", coming=Coming(usual.stream, len(usual.stream)))
    assert set(usual.stream) < set(there.stream) and there.ahead == there.stream
    packed = cost.copy.expert - cost.copy.resident
    without = lanes(cost, KIND, counts, of(there))["copy"] - len(usual.stream) * packed
    assert there.seconds["copy"] == there.expected["copy"] == pytest.approx(without)
    # Copies that are not done yet are part of what is expected now, but not of what is measured from now on
    none = placer.decide(counts, (), "forward", coming=Coming(usual.stream))
    assert of(none) == of(usual)
    assert none.seconds == usual.seconds
    assert none.expected["copy"] == pytest.approx(usual.seconds["copy"] - len(usual.stream) * packed)
    backward = placer.again(there, counts, "backward", Coming(there.stream, 3.0))
    assert of(backward) == of(there)
    alone = placer.again(there, counts, "backward")
    assert backward.seconds["copy"] < alone.seconds["copy"] == alone.expected["copy"]
    assert placer.decide(counts, (), "forward", "cpu", Coming(usual.stream)).cpu == list(range(128))


def test_what_set_out_too_much_is_used_but_does_not_set_out_again() -> None:
    placer, counts = Placer(KIND, RATES), [40] * 128
    usual = placer.decide(counts, (), "forward")
    coming = list(range(28, 128))
    assert 0 < len(usual.stream) < len(coming)
    placed = placer.decide(counts, (), "forward", coming=Coming(coming))
    assert placed.stream == coming and placed.cpu == list(range(28))
    assert placed.ahead == coming[: len(usual.stream)]


@pytest.mark.parametrize("work", PASSES)
def test_with_experts_on_their_way_no_other_cut_is_better(work: str) -> None:
    for seed in range(40):
        kind, rates, counts, _ = random_case(seed)
        rng = np.random.default_rng(seed)
        coming = Coming(rng.permutation(9)[: rng.integers(1, 9)].tolist(), float(rng.uniform(0, 4)))
        placer = Placer(kind, rates)
        placed = placer.decide(counts, (), work, coming=coming)
        order = placed.stream + placed.cpu

        def taken(n: int) -> float:
            other = replace(placed, stream=order[:n], cpu=order[n:])  # noqa: B023
            return max(placer.again(other, counts, work, coming).seconds.values())  # noqa: B023

        assert sorted(order) == [e for e, rows in enumerate(counts) if rows]
        if placed.stream:
            assert {e for e in coming.experts if counts[e]} <= set(placed.stream)
        best = min(map(taken, range(len(order) + 1)))
        assert best * (1 - 1e-9) <= taken(len(placed.ahead)) <= best * 1.02


def test_equal_counts_decide_equally_and_ties_go_by_number() -> None:
    placer = Placer(KIND, RATES)
    placed = placer.decide([256] * 128, (), "forward")
    assert placed.stream and placed.cpu
    assert placed.stream + placed.cpu == list(range(128))
    assert of(placer.decide(np.full(128, 256), (), "forward")) == of(placed)  # numpy sums in another order
    assert Placer(KIND, RATES).decide([256] * 128, set(), "forward") == placed


def test_no_rows_and_one_row() -> None:
    assert of(Placer(KIND, RATES).decide([0] * 128, {1, 2}, "forward")) == ([], [], [])
    placed = Placer(KIND, RATES).decide([0] * 5 + [1] + [0] * 122, {1, 2}, "backward")
    assert sum(map(len, of(placed))) == 1


def test_many_rows_go_to_the_gpu_and_few_to_the_cpu() -> None:
    counts = [2] * 100 + [2000] * 28
    placed = Placer(KIND, RATES).decide(counts, (), "forward")
    assert set(range(100, 128)) <= set(placed.stream)
    assert set(placed.cpu) <= set(range(100)) and len(placed.cpu) > 40


# --- correcting rates -------------------------------------------------------------------------------------------------


class Truth:
    """A machine whose lanes take other times than the rates say, now more and now less."""

    def __init__(self, **factors: float) -> None:
        self.factors, self.rng = factors, np.random.default_rng(1)

    def run(self, placed: Placement, counts: list[int], work: str, noise: float = 0.05) -> dict[str, float]:
        own = lanes(costs(KIND, RATES, work), KIND, counts, of(placed))
        return {lane: own[lane] * self.factors[lane] * float(self.rng.lognormal(0, noise)) for lane in Lane}

    def best(self, counts: list[int], work: str) -> float:
        cost = costs(KIND, RATES, work).corrected(self.factors)
        used = sorted(range(128), key=lambda e: (-counts[e], e))
        return min(max(lanes(cost, KIND, counts, (used[n:], used[:n], [])).values()) for n in range(129))


def draw(seed: int) -> list[int]:
    return np.random.default_rng(seed).multinomial(4096 * 8, [1 / 128] * 128).tolist()


@pytest.mark.parametrize("cpu", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("copy", [0.5, 1.0, 2.0])
def test_corrections_converge_and_do_not_oscillate(cpu: float, copy: float) -> None:
    placer, truth, streamed, over = Placer(KIND, RATES), Truth(cpu=cpu, copy=copy, gpu=1.0), [], []
    for layer in range(96):
        counts = draw(layer)
        placed = placer.decide(counts, (), "backward")
        took = truth.run(placed, counts, "backward")
        placer.observe("backward", placed, took)
        streamed.append(len(placed.stream))
        exact = lanes(costs(KIND, RATES, "backward").corrected(truth.factors), KIND, counts, of(placed))
        over.append(max(exact.values()) / truth.best(counts, "backward"))
    assert max(over[48:]) < 1.06  # measured times have 5% of noise
    assert max(streamed[48:]) - min(streamed[48:]) <= 12
    assert placer.corrections("backward")["cpu"] == pytest.approx(cpu, rel=0.08)
    assert placer.corrections("forward") == dict.fromkeys(Lane, 1.0)


def test_corrections_follow_a_drift_and_survive_hiccups() -> None:
    placer, truth, over = Placer(KIND, RATES), Truth(cpu=1.0, copy=1.0, gpu=1.0), []
    for layer in range(300):
        truth.factors["cpu"] = 2 ** math.sin(layer / 48)  # from twice as slow to twice as fast within a few steps
        counts = draw(layer)
        placed = placer.decide(counts, (), "forward")
        took = truth.run(placed, counts, "forward")
        if layer % 25 == 13:
            took["copy"] *= 20  # somebody else's moment
        placer.observe("forward", placed, took)
        exact = lanes(costs(KIND, RATES, "forward").corrected(truth.factors), KIND, counts, of(placed))
        over.append(max(exact.values()) / truth.best(counts, "forward"))
    assert sum(over[20:]) / len(over[20:]) < 1.06
    assert max(over[20:]) < 1.25


def test_observations_that_come_a_step_late_do_not_overshoot() -> None:
    placer, truth, seen = Placer(KIND, RATES), Truth(cpu=2.0, copy=1.0, gpu=1.0), []
    for step in range(6):
        made = [(counts := draw(48 * step + n), placer.decide(counts, (), "forward")) for n in range(48)]
        for counts, placed in made:
            placer.observe("forward", placed, truth.run(placed, counts, "forward"))
        seen.append(placer.corrections("forward")["cpu"])
    assert all(1.85 < factor < 2.15 for factor in seen)


def test_a_bad_moment_does_not_shut_a_lane_for_ever() -> None:
    placer, truth = Placer(KIND, RATES), Truth(cpu=1.0, copy=1.0, gpu=1.0)
    counts = [256] * 128
    for _ in range(40):  # the CPU looks hopeless
        placed = placer.decide(counts, (), "forward")
        placer.observe("forward", placed, truth.run(placed, counts, "forward") | {"cpu": 10.0})
    assert not placer.decide(counts, (), "forward").cpu
    for _ in range(4000):
        placed = placer.decide(counts, (), "forward")
        took = truth.run(placed, counts, "forward")
        placer.observe("forward", placed, {lane: seconds for lane, seconds in took.items() if seconds})
    assert placer.decide(counts, (), "forward").cpu
    assert placer.corrections("forward")["cpu"] < 2


def test_times_that_are_none_change_nothing() -> None:
    placer = Placer(KIND, RATES)
    placed = placer.decide(draw(0), (), "forward")
    for seconds in ({}, {"cpu": 0.0}, {"copy": math.inf}, {"gpu": math.nan}):
        placer.observe("forward", placed, seconds)
    assert placer.corrections("forward") == dict.fromkeys(Lane, 1.0)


# --- settings ---------------------------------------------------------------------------------------------------------


def test_placement_without_cuda() -> None:
    assert usable_placement(Settings(), cuda=False) == "cpu"
    assert usable_placement(Settings(gpu_expert_memory="auto"), cuda=False) == "cpu"
    for name in ("auto", "cpu", "stream"):
        assert usable_placement(Settings(placement=name), cuda=True) == name
    with pytest.raises(ValueError, match=r"placement is 'stream', but torch sees no GPU.*Set placement: auto"):
        usable_placement(Settings(placement="stream"), cuda=False)
    with pytest.raises(ValueError, match="placement is 'resident', but torch sees no GPU"):
        usable_placement(Settings(placement="resident", gpu_expert_memory="4G"), cuda=False)
    with pytest.raises(ValueError, match="gpu_expert_memory is 4294967296 bytes, but torch sees no GPU"):
        usable_placement(Settings(gpu_expert_memory="4G"), cuda=False)
