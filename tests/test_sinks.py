"""Attention with sinks without scores in memory: transformers' numbers, and only where they are."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapted import load, logits, lora_config, randomize
from given import Checkpoint
from lanes import no_calibration
from tiny import make_config
from torch import Tensor, nn
from transformers.models.gpt_oss import modeling_gpt_oss

import ktft
from ktft import hosts
from ktft.model import sinks
from ktft.model.shape import shape_of

__all__ = ["no_calibration"]

pytestmark = pytest.mark.usefixtures("no_calibration")

PLAIN = modeling_gpt_oss.eager_attention_forward
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def own_state(stock_hosts: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sinks, "DEVICES", set(DEVICES))
    monkeypatch.setattr(sinks, "_agree", {})
    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", PLAIN)  # put back afterwards
    yield
    hosts.undo()  # before what the test patched is put back


class Attention(nn.Module):
    def __init__(self, heads: int = 6, groups: int = 3) -> None:
        super().__init__()
        self.sinks, self.num_key_value_groups = nn.Parameter(torch.randn(heads), requires_grad=False), groups


Attention.__module__ = modeling_gpt_oss.__name__


def inputs(device: str, dtype: torch.dtype, tokens: int, masked: bool) -> tuple[Any, ...]:
    """With a mask: causal, of which the second sequence has five tokens of padding at its left."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, tokens, 32, device=device, dtype=dtype, requires_grad=True) for heads in (6, 2, 2))
    mask = torch.full((2, 1, tokens, tokens), torch.finfo(dtype).min, device=device).triu(1)
    mask[1, :, :, :5] = torch.finfo(dtype).min
    return q, k, v, mask.to(dtype) if masked else None, 0.2


def run(function: Any, module: Any, given: tuple[Any, ...]) -> list[Tensor]:
    out, _ = function(module, *given)
    weights = torch.arange(out.numel(), device=out.device).view(out.shape).sin()
    return [out, *torch.autograd.grad((out.float() * weights).sum(), given[:3])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "masked"), [(37, True), (64, True), (9, False)])
def test_it_gives_what_transformers_gives(device: str, dtype: torch.dtype, tokens: int, masked: bool) -> None:
    module = Attention().to(device, dtype)
    sinks.fuse_sinks(module)
    fused = modeling_gpt_oss.eager_attention_forward
    assert fused is not PLAIN
    given = inputs(device, dtype, tokens, masked)
    exact = tuple(each.detach().double().requires_grad_() if isinstance(each, Tensor) else each for each in given)
    found = run(fused, module, given)
    expected, theirs = run(PLAIN, deepcopy(module).double(), exact), run(PLAIN, module, given)
    assert fused(module, *given)[1] is None
    for mine, right, rounded in zip(found, expected, theirs, strict=True):
        assert mine.shape == right.shape and mine.isfinite().all()
        bound = 1e-5 if dtype == torch.float32 else 1.5 * float((rounded - right).norm() / right.norm())
        assert (mine - right).norm() <= bound * right.norm()
    assert list(sinks._agree.values()) == [True]
    hosts.undo()
    assert modeling_gpt_oss.eager_attention_forward is PLAIN


@pytest.mark.parametrize(
    "change",
    [
        {"dropout": 0.1},
        {"output_attentions": True},
        {"sinks": nn.Parameter(torch.zeros(6))},  # trained: nothing gives them gradients
    ],
)
def test_whatever_else_is_asked_goes_the_usual_way(change: dict[str, Any]) -> None:
    module = Attention()
    sinks.fuse_sinks(module)
    module.sinks = change.pop("sinks", module.sinks)
    given = inputs("cpu", torch.float32, 9, True)
    _, weights = modeling_gpt_oss.eager_attention_forward(module.eval(), *given, **change)
    assert weights is not None and sinks._agree == {}


def test_another_computation_is_not_fused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def doubled(
        module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: Any, dropout: Any = 0.0,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        return PLAIN(module, query, key, value, attention_mask, 2 * scaling)

    monkeypatch.setattr(modeling_gpt_oss, "eager_attention_forward", doubled)
    sinks.fuse_sinks(Attention())
    with caplog.at_level("INFO", "ktft"):
        given = inputs("cpu", torch.float32, 9, True)
        _, weights = modeling_gpt_oss.eager_attention_forward(Attention(), *given)
    assert weights is not None and list(sinks._agree.values()) == [False]
    assert "computes something else, so it is not fused" in caplog.text


def test_a_model_has_the_same_logits_and_gradients(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    path = tiny_checkpoint("gpt_oss")
    found = []
    for devices in ({"none"}, {"cpu"}):
        monkeypatch.setattr(sinks, "DEVICES", devices)
        torch.manual_seed(0)
        model = randomize(ktft.get_peft_model(load(path), lora_config()), std=0.05)
        ids = torch.arange(3, 63).view(2, 30)
        mask = torch.ones_like(ids)
        mask[1, :4] = 0
        model(input_ids=ids, attention_mask=mask, labels=ids).loss.backward()
        grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        found.append((logits(model), grads))
    (plain, theirs), (fused, mine) = found
    assert list(sinks._agree.values()) == [True]
    assert (fused - plain).norm() <= 1e-4 * plain.norm() and not torch.equal(fused, plain)
    print(
        sorted(
            (float((mine[n] - e).norm() / e.norm().clamp_min(1e-30)), float(e.norm()), n) for n, e in theirs.items()
        )[-6:]
    )
    assert all((mine[name] - each).norm() <= 5e-3 * each.norm() for name, each in theirs.items())


def test_the_plan_counts_no_scores() -> None:
    shape, model = shape_of(make_config("gpt_oss"))
    assert model.config._attn_implementation == "eager" and not shape.eager
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(_attn_implementation="eager"))
    other = nn.Module()
    other.config = config  # type: ignore[assignment]
    assert sinks.keeps_scores(other)
