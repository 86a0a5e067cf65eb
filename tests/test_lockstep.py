"""Callables in lockstep wait for each other; one runs at a time, and each has its own modes and random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch

from ktft.model.lockstep import Lockstep, after_all, current


@pytest.fixture
def lockstep() -> Lockstep:
    return Lockstep(torch.device("cpu"))


def run(lockstep: Lockstep, works: Sequence[Callable[[], Any]]) -> list[Any]:
    return lockstep.run(works, lockstep.seeded(len(works)))


def meet(key: object, value: Any, acted: list[Any]) -> Any:
    member = current()
    assert member is not None

    def act(values: list[Any]) -> list[Any]:
        acted.append((key, values, torch.is_grad_enabled(), threading.get_ident()))
        return [sum(values)] * len(values)

    return member.meet(key, value, act)


def test_one_act_serves_all_in_their_order(lockstep: Lockstep) -> None:
    acted: list[Any] = []
    told: list[str] = []

    def work(number: int) -> int:
        told.append(f"{number} begins")
        first: int = meet("first", number, acted)
        told.append(f"{number} goes on")
        return first + int(meet("second", 10 * number, acted))

    assert run(lockstep, [partial(work, number) for number in (1, 2, 3)]) == [66, 66, 66]
    here = threading.get_ident()
    assert acted == [("first", [1, 2, 3], True, here), ("second", [10, 20, 30], True, here)]
    assert told == [f"{number} {what}" for what in ("begins", "goes on") for number in (1, 2, 3)]
    assert current() is None


def test_those_that_end_early_or_go_another_way_hold_up_nobody(lockstep: Lockstep) -> None:
    acted: list[Any] = []

    def work(number: int) -> None:
        for turn in range(number):
            meet("odd" if number == 3 and turn == 1 else turn, number, acted)

    run(lockstep, [partial(work, number) for number in (0, 1, 3, 2)])
    assert [(key, values) for key, values, *_ in acted] == [(0, [1, 3, 2]), ("odd", [3]), (1, [2]), (2, [3])]


def test_modes_belong_to_each(lockstep: Lockstep) -> None:
    """Members without gradients do not meet those with, and leave the mode of the others as it is."""
    acted: list[Any] = []

    def work(gradients: bool) -> bool:
        with torch.set_grad_enabled(gradients):
            meet("together", 1, acted)
        return torch.is_grad_enabled()

    assert run(lockstep, [partial(work, gradients) for gradients in (False, True, False)]) == [True] * 3
    assert [(values, gradients) for _, values, gradients, _ in acted] == [([1, 1], False), ([1], True)]


def test_random_numbers_belong_to_each(lockstep: Lockstep) -> None:
    """A part that is run again from the state that it began with draws the same, whatever ran in between."""
    states: list[Any] = []

    def work(*, alone: bool) -> list[float]:
        member = current()
        assert member is not None
        states.append(member.random_state())
        drawn = [float(torch.rand(()))]
        if not alone:
            meet("together", 0, [])
        return [*drawn, float(torch.rand(()))]

    torch.manual_seed(3)
    first = run(lockstep, [partial(work, alone=False)] * 3)
    after = float(torch.rand(()))
    again = [lockstep.run([partial(work, alone=True)], [state])[0] for state in states[:3]]
    assert again == first and len({tuple(each) for each in first}) == 3
    torch.manual_seed(3)
    lockstep.seeded(3)
    assert float(torch.rand(())) == after, "only the seeds are drawn from the program's own numbers"


def test_an_error_ends_all(lockstep: Lockstep) -> None:
    ended: list[int] = []

    def work(number: int) -> None:
        try:
            meet("first", number, [])
            if number == 1:
                raise KeyError("of the second")
            meet("second", number, [])
        finally:
            ended.append(number)

    with pytest.raises(KeyError, match="of the second"):
        run(lockstep, [partial(work, number) for number in range(3)])
    assert sorted(ended) == [0, 1, 2]
    assert run(lockstep, [lambda: 1, lambda: 2]) == [1, 2], "it runs others afterwards"


def test_an_error_of_the_act_reaches_the_caller(lockstep: Lockstep) -> None:
    def work() -> None:
        member = current()
        assert member is not None
        member.meet("key", 0, lambda values: 1 / 0)  # type: ignore[arg-type,return-value]

    with pytest.raises(ZeroDivisionError):
        run(lockstep, [work, work])


def test_a_change_of_what_all_share_waits_for_all(lockstep: Lockstep) -> None:
    shared = {"on": True}
    seen: list[bool] = []

    def work() -> None:
        seen.append(shared["on"])
        after_all(shared.update, {"on": False})
        seen.append(shared["on"])

    run(lockstep, [work, work])
    assert seen == [True, True, False, False]
    after_all(shared.update, {"on": True})  # outside it is a plain call
    assert shared["on"]
