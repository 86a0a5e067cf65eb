"""Which lanes `auto` uses, learned from steps of a machine whose rates are wrong."""

from __future__ import annotations

import random

import pytest

from ktft.lanes.decide.trial import AGAIN, AT_MOST, MORE, TRIALS, TRIED, Choice

EXPECTED = {"auto": 1.0, "stream": 1.2, "cpu": 1.5}


class Machine:
    """A step takes `seconds` of its mode plus up to 3% noise, or `first` after another mode; `modes` has them all."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.now, self.seconds, self.first, self.modes = 0.0, seconds, dict[str, float](), list[str]()
        self.choice, self.noise = Choice(lambda: self.now), random.Random(0)

    def step(self, tokens: int, expected: dict[str, float] = EXPECTED) -> str:
        way = self.choice.mode(tokens, lambda: expected)
        for _ in range(3):  # further layers
            assert self.choice.mode(tokens, lambda: expected) == way
        seconds = self.seconds if self.modes[-1:] == [way] else self.seconds | self.first
        self.now += seconds[way] * self.noise.uniform(1, 1.03)
        self.choice.end_step()
        self.now += 5.0  # saving, evaluating
        self.modes.append(way)
        return way

    def steps(self, count: int, tokens: int = 512) -> None:
        for _ in range(count):
            self.step(tokens)


@pytest.mark.parametrize("fastest", TRIED)
def test_the_fastest_mode_is_found(fastest: str) -> None:
    machine = Machine({way: 1.0 if way == fastest else 1.1 for way in TRIED})
    machine.steps(200)
    tried = 2 + TRIALS + MORE
    assert machine.modes[tried * len(TRIED) :].count(fastest) >= 200 - tried * len(TRIED) - tried
    machine.steps(2000)
    assert machine.modes[200:].count(fastest) >= 2000 - (2000 // AT_MOST + 2) * tried


def test_modes_that_the_rates_rule_out_are_not_tried() -> None:
    machine = Machine(dict.fromkeys(TRIED, 1.0))
    for _ in range(20):
        machine.step(512, {"auto": 1.0, "stream": 1.0, "cpu": 9.0})
    assert "cpu" not in machine.modes and {"auto", "stream"} <= set(machine.modes)


def test_batch_sizes_are_learned_separately() -> None:
    machine = Machine({"auto": 1.0, "stream": 2.0, "cpu": 3.0})
    machine.steps(20)
    machine.seconds = {"auto": 5.0, "stream": 2.0, "cpu": 3.0}
    machine.steps(20, 8192)
    assert machine.step(8192) == "stream" and machine.step(520) == "auto"


def test_a_change_of_the_machine_is_noticed() -> None:
    machine = Machine({"auto": 1.0, "stream": 1.1, "cpu": 3.0})
    machine.steps(30)
    assert machine.step(512) == "auto"
    machine.seconds["auto"] = 1.3
    machine.steps(30)
    assert machine.step(512) == "stream"
    machine.seconds["auto"] = 0.8
    machine.steps(8 * AGAIN)
    assert machine.modes[-10:].count("auto") >= 9


def test_disturbed_steps_do_not_decide() -> None:
    """A quarter of the steps take a third longer, and some are faster."""
    machine = Machine({"auto": 1.0, "stream": 1.1, "cpu": 3.0})
    machine.noise = random.Random(1)
    machine.noise.uniform = lambda *_: machine.noise.choices((1.0, 1.35, 0.85), (13, 5, 2))[0]  # type: ignore[method-assign]
    machine.steps(300)
    assert machine.modes[-100:].count("auto") > 95


def test_a_machine_that_slows_down_for_a_while_does_not_change_the_choice() -> None:
    machine = Machine({"auto": 1.0, "stream": 1.1, "cpu": 3.0})
    machine.steps(40)
    machine.seconds = {"auto": 1.5, "stream": 1.65, "cpu": 4.5}
    machine.steps(60)
    assert machine.modes[40:].count("stream") <= 2 * (2 + TRIALS + MORE)


def test_passes_outside_of_steps_get_a_mode() -> None:
    choice = Choice()
    assert choice.mode(16, lambda: EXPECTED) in TRIED
    choice.end_step()
    choice.end_step()


def test_evaluation_between_steps_does_not_count() -> None:
    machine = Machine({"auto": 1.0, "stream": 1.1, "cpu": 3.0})
    for _ in range(40):
        machine.choice.begin_step()
        if machine.step(512) == "auto":
            machine.choice.mode(512, lambda: EXPECTED)  # evaluates, after the way that is to win
            machine.now += 2.0
    assert machine.modes[-10:].count("auto") == 10


def test_close_modes_are_tried_more_often_than_slow_ones() -> None:
    machine = Machine({"auto": 1.0, "stream": 1.05, "cpu": 3.0})
    machine.steps(3 * (1 + TRIALS) + 2 * (1 + MORE))
    assert machine.modes.count("auto") == machine.modes.count("stream") == TRIALS + MORE + 2
    assert machine.modes.count("cpu") == TRIALS + 1


def test_a_mode_is_judged_by_steps_that_follow_itself() -> None:
    """Streaming finds experts on the device only if the step before streamed too."""
    machine = Machine({"auto": 1.0, "stream": 0.8, "cpu": 3.0})
    machine.first = {"auto": 1.0, "stream": 1.6, "cpu": 3.0}
    machine.steps(40)
    assert machine.modes[-10:] == ["stream"] * 10


def test_a_step_after_a_pause_does_not_count() -> None:
    """Every second step follows a save that leaves the caches cold, and takes half as long again."""
    machine = Machine({"auto": 1.1, "stream": 1.0, "cpu": 3.0})
    machine.steps(20)
    for _ in range(30):
        machine.now += 100.0
        machine.seconds = {"auto": 1.6, "stream": 1.5, "cpu": 3.0}
        machine.step(512)
        machine.seconds = {"auto": 1.1, "stream": 1.0, "cpu": 3.0}
        machine.step(512)
    assert machine.modes[20:].count("stream") >= 58


def test_long_batches_between_short_ones_do_count() -> None:
    """Long batches spend ten times as long before the first experts."""
    machine = Machine({"auto": 1.1, "stream": 1.0, "cpu": 3.0})
    for _ in range(30):
        machine.step(512)
        machine.now += 45.0
        machine.step(16384)
    assert machine.step(512) == "stream" and machine.step(16384) == "stream"
