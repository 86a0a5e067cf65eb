"""Shared experts computed ahead: once, the same values and gradients, only where the block asks for them late."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ktft.model.shared import shared_ahead

SIZE = 8


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(SIZE, SIZE), 0

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.linear(hidden_states)
        return out


class Block(nn.Module):
    """As DeepSeek's: hidden states `[1, T, H]`, routed experts of `[T, H]`, then shared ones of the whole."""

    def __init__(self, shared_first: bool = False) -> None:
        super().__init__()
        self.shared_experts, self.shared_first = Shared(), shared_first
        self.ahead = None

    def experts(self, hidden_states: Tensor) -> Tensor:
        if self.ahead is not None:
            self.ahead.compute(hidden_states)
        return hidden_states * 2

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.shared_first:
            shared = self.shared_experts(hidden_states)
            return self.experts(hidden_states.view(-1, SIZE)).view(hidden_states.shape) + shared
        routed = self.experts(hidden_states.view(-1, SIZE)).view(hidden_states.shape)
        return routed + self.shared_experts(hidden_states)


@pytest.mark.parametrize("shared_first", [False, True])
def test_once_and_the_same(shared_first: bool) -> None:
    plain = Block(shared_first)
    block = copy.deepcopy(plain)
    block.ahead = shared_ahead(block, ("shared_experts",), SIZE)
    assert block.ahead is not None
    for _ in range(3):
        x = torch.randn(1, 5, SIZE)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outs = [module(own) for module, own in zip((plain, block), inputs, strict=True)]
        for out in outs:
            out.square().sum().backward()
        assert torch.equal(*outs) and torch.equal(inputs[0].grad, inputs[1].grad)
    assert block.shared_experts.calls == plain.shared_experts.calls == 3
    for a, b in zip(plain.parameters(), block.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_what_was_changed_meanwhile_is_computed_again() -> None:
    block = Block()
    ahead = shared_ahead(block, ("shared_experts",), SIZE)
    assert ahead is not None
    x = torch.randn(1, 5, SIZE)
    with torch.no_grad():
        ahead.compute(x.view(-1, SIZE))
        x.mul_(2)
        assert torch.equal(block.shared_experts(x), block.shared_experts.linear(x))
        ahead.compute(x.view(-1, SIZE))
        other = torch.randn(1, 5, SIZE)
        assert torch.equal(block.shared_experts(other), block.shared_experts.linear(other))


def test_a_block_without_shared_experts() -> None:
    assert shared_ahead(nn.Module(), ("shared_experts",), SIZE) is None
    assert shared_ahead(nn.Module(), (), SIZE) is None


def test_shared_experts_with_another_input_wait_for_the_block() -> None:
    """Routed experts may work on a narrower projection, of which the shared ones cannot be computed."""
    assert shared_ahead(Block(), ("shared_experts",), SIZE // 2) is None


def test_inference_mode() -> None:
    """Its tensors have no version that would tell of a change, so the block computes its shared experts itself."""
    plain = Block()
    block = copy.deepcopy(plain)
    block.ahead = shared_ahead(block, ("shared_experts",), SIZE)
    with torch.inference_mode():
        x = torch.randn(1, 5, SIZE)
        assert torch.equal(block(x), plain(x))
