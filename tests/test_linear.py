"""LoRA on linear layers by the short way: PEFT's numbers, bit for bit."""

from __future__ import annotations

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


def run(own: Any, autocast: bool = True, **kwargs: Any) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(3, 5, 24, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = own(x)
    trained = [parameter for parameter in own.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(out.float().square().sum(), [x, *trained], allow_unused=True)
    return [out, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("alpha", [8, 12])
def test_the_short_way_gives_the_same_bits(alpha: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = model(alpha=alpha)
    expected = run(own)
    linear.shorten(own)
    monkeypatch.setattr(linear.Linear, "forward", None)  # not called
    assert all(map(torch.equal, run(own), expected))


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
        own.base_model.model.q.base_layer.weight.requires_grad_()
    if change == "no autocast":
        own.bfloat16()
    expected = run(own, change != "no autocast")
    linear.shorten(own)
    if change == "restored":
        linear.restore(own)
        assert "forward" not in layer.__dict__
    assert all(map(torch.equal, run(own, change != "no autocast"), expected))
