"""What a Trainer does anew for each step is done without walks over the model, and with the same result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ktft.train.unchanged import TrainingMode, WalkedOnce


@pytest.fixture
def model() -> nn.Module:
    found = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    found[0].weight.requires_grad_(False)
    return found


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The walks over modules from now on."""
    seen: list[str] = []
    original = nn.Module.named_modules

    def named_modules(self: nn.Module, *args: Any, **kwargs: Any) -> Iterator[Any]:
        seen.append(type(self).__name__)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(nn.Module, "named_modules", named_modules)
    return seen


def test_gradients_are_dropped_without_a_walk(model: nn.Module, walks: list[str]) -> None:
    walked = WalkedOnce(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # of frozen ones too
    walks.clear()
    model.zero_grad()
    assert not walks and all(parameter.grad is None for parameter in model.parameters())
    own = model[1][1].weight
    own.grad = torch.ones_like(own)
    model.zero_grad(set_to_none=False)
    assert own.grad is not None and not own.grad.any()
    assert list(walked.parameters) == list(model.parameters())
    walked.close()
    own.grad = torch.ones_like(own)
    model.zero_grad()
    assert own.grad is None and "zero_grad" not in vars(model)


def test_training_mode_is_kept_and_restored(model: nn.Module) -> None:
    mode = TrainingMode(model)
    model[1][0].eval()
    calls: list[bool] = []
    original = model[1].train
    model[1].__dict__["train"] = lambda flag=True: (calls.append(flag), original(flag))[1]
    for _ in range(2):
        with mode.kept():
            assert all(module.training for module in model.modules())
            model.train()
    assert calls == [True]  # the second time nothing had changed
    with mode.kept():
        model.eval()
        assert not any(module.training for module in model.modules())
    assert "train" not in vars(model)
    with mode.kept():
        assert all(module.training for module in model.modules())
