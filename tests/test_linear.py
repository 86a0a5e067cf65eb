"""LoRA on linear layers by the short way: PEFT's numbers, with fewer roundings."""

from __future__ import annotations

import copy
import statistics
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from ktft.adapters import linear


class Block(nn.Module):
    """Three layers that share an input, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(24, 16, bias=False), nn.Linear(24, 16), nn.Linear(24, 16, bias=False)
        self.o = nn.Linear(16, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(torch.tanh(self.q(x)) * self.k(x) + self.v(x))
        return out


def model(dropout: float = 0.0, alpha: int = 12) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=alpha, lora_dropout=dropout, target_modules=["q", "k", "v", "o"])
    found = get_peft_model(Block().bfloat16(), config)  # type: ignore[arg-type]
    for name, parameter in found.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.3)
            parameter.data = parameter.data.float()
    return found.train()


def trained(own: Any) -> list[str]:
    return [name for name, parameter in own.named_parameters() if parameter.requires_grad]


def run(own: Any, autocast: bool = True, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, 5, 24, dtype=torch.bfloat16).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = own(x)
    parameters = [x, *(own.get_parameter(name) for name in trained(own))]
    loss = out.to(torch.promote_types(out.dtype, torch.float32)).square().sum()
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def errors(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((f.double() - e).norm() / e.norm()) for f, e in zip(found, exact, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("alpha", [8, 12])
def test_the_short_way_is_as_exact_as_pefts(alpha: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    own = model(alpha=alpha)
    exact = run(copy.deepcopy(own).double(), False, dtype=torch.float64)
    theirs = errors(run(own, dtype=dtype), exact)
    linear.shorten(own)
    monkeypatch.setattr(linear.Linear, "forward", None)  # not called
    found = run(own, dtype=dtype)
    names = ["out", "x", *trained(own)]
    ratios = {name: ours / limit for name, ours, limit in zip(names, errors(found, exact), theirs, strict=True)}
    # Of so few numbers each ratio is chance in part
    assert max(ratios.values()) < 2 and statistics.geometric_mean(ratios.values()) < 1.1, ratios
    assert [each.dtype for each in found] == [torch.bfloat16, dtype, *[torch.float32] * (len(found) - 2)]


def test_only_what_needs_a_gradient_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    own = model()
    for name, parameter in own.named_parameters():
        parameter.requires_grad_("lora_B" in name and ".o." not in name)
    expected = run(own)
    linear.shorten(own)
    monkeypatch.setattr(linear.Linear, "forward", None)
    found = run(own)
    assert len(found) == len(expected) == 5  # the output, x and three projections
    assert max(errors(found, [each.double() for each in expected])) < 0.02


@pytest.mark.parametrize("change", ["dropout", "no autocast", "disabled", "merged", "hook", "two", "restored"])
def test_all_else_goes_pefts_way(change: str) -> None:
    own = model(dropout=0.5 if change == "dropout" else 0.0)
    layer = own.base_model.model.q
    if change == "two":
        own.add_adapter("second", LoraConfig(r=2, target_modules=["q"], init_lora_weights=False))
        own.base_model.set_adapter(["default", "second"])
    if change == "hook":
        layer.base_layer.register_forward_hook(lambda module, args, out: out * 2)
    if change == "merged":
        own.merge_adapter()
    if change == "disabled":
        own.base_model.disable_adapter_layers()
        layer.base_layer.weight.requires_grad_()
    if change == "no autocast":
        own.bfloat16()
    expected = run(own, change != "no autocast")
    linear.shorten(layer)  # alone: the others' roundings are not PEFT's
    if change == "restored":
        linear.restore(own)
        assert "forward" not in layer.__dict__
    assert all(map(torch.equal, run(own, change != "no autocast"), expected))


def test_no_rows_at_all() -> None:
    own = model()
    linear.shorten(own)
    x = torch.zeros(2, 0, 24, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = own.base_model.model.q(x)
    (grad,) = torch.autograd.grad(out.float().sum(), x)
    assert out.shape == (2, 0, 16) and grad.shape == x.shape


@pytest.mark.parametrize("biased", [False, True])
def test_gradients_are_those_of_the_formula(biased: bool) -> None:
    x, weight, a, b = (torch.randn(*shape, dtype=torch.float64) for shape in ((2, 3, 6), (5, 6), (2, 6), (5, 2)))
    bias = torch.randn(5, dtype=torch.float64) if biased else None
    given = [each.requires_grad_() for each in (x, a, b)]

    def lora(x: Tensor, a: Tensor, b: Tensor) -> Any:
        return linear._Lora.apply(x, weight, bias, a, b, 1.5)

    expected = torch.nn.functional.linear(x, weight, bias) + 1.5 * x @ a.T @ b.T
    torch.testing.assert_close(lora(*given), expected)
    assert torch.autograd.gradcheck(lora, given)
