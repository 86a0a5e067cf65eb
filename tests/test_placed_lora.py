"""LoRA of several adapters on linear layers beside a GPU; the CPU's torch stands in for it."""

from __future__ import annotations

import pytest
import torch
from placed import INPUTS, check, load, made, product, slices

from ktft.serve.runtime.lora_linear import FEW_ROWS
from ktft.serve.runtime.step_adapters import StepAdapters


def test_few_rows_and_many() -> None:
    check(rows=(1, 5, FEW_ROWS, FEW_ROWS + 30))


def test_one_adapter_for_all_of_many_rows() -> None:
    lora = made()
    load(lora, 3, slices(8, 0, 1, 2, seed=5))
    x = torch.randn(FEW_ROWS + 6, INPUTS)
    lora.step.set([3] * len(x), {3})
    many = product(lora, x)
    lora.step.set([3] * 10, {3})
    torch.testing.assert_close(product(lora, x[:10]), many[:10], rtol=1e-3, atol=1e-3)
    assert many.abs().min(1).values.min() > 0


def test_a_step_of_the_base_alone_changes_nothing() -> None:
    """And tokens whose adapter is gone are the base's, in what may have been captured for adapters."""
    lora = made()
    load(lora, 1, slices(8, 0, seed=5))
    x = torch.randn(4, INPUTS)
    for numbers, mixed in (([0] * 4, False), ([1] * 4, True), ([2, 0, 2, 2], True), ([0] * 4, False)):
        lora.step.set(numbers, {1})
        assert lora.step.mixed == mixed
        assert bool(product(lora, x).any()) == (1 in numbers)
        assert lora.step.of_token is not None
        assert lora.step.of_token.tolist() == [0 if number == 1 else -1 for number in numbers] + [-1] * 124


def test_rows_beyond_the_steps_are_padding() -> None:
    lora = made()
    load(lora, 1, slices(8, 0, seed=5))
    for rows in (6, FEW_ROWS + 6):
        lora.step.set([1] * 4, {1})
        out = product(lora, torch.randn(rows, INPUTS))
        assert out[:4].any() and not out[4:].any()


def test_a_rank_without_room_is_refused_before_anything_changes() -> None:
    lora = made()
    with pytest.raises(ValueError, match=r"layers\.3\.qkv: the adapter has rank 49, there is room for 48"):
        lora.joined(1, lora.stacked(slices(49, 0, seed=1)))


def test_places_are_given_again() -> None:
    step = StepAdapters()
    step.reserve(torch.device("cpu"), 8, 2)
    assert [step.take(5), step.take(6)] == [0, 1]
    with pytest.raises(ValueError, match="there is room for 2 adapters, which are loaded"):
        step.take(7)
    step.leave(5)
    assert step.take(7) == 0 and step.places == {6: 1, 7: 0}


def test_groups_of_rows() -> None:
    step = StepAdapters()
    step.reserve(torch.device("cpu"), 8, 3)
    for number in (2, 3, 4):
        step.take(number)
    step.set([3, 2, 0, 3, 9, 4], {2, 3, 4})
    found = {number: rows.tolist() for number, rows in step.groups(6, "a layer", {3, 4, 5})}
    assert found == {0: [1, 2, 4], 3: [0, 3], 4: [5]}
    assert [number for number, _ in step.groups(6, "a layer", ())] == [0]
    with pytest.raises(RuntimeError, match="a layer computes 5 rows of a step with 6 tokens"):
        step.groups(5, "a layer", ())
