"""Rotary position embedding in few launches: transformers' numbers, and only where they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.qwen3_moe import modeling_qwen3_moe

from ktft import hosts
from ktft.model import rotary

PLAIN = modeling_qwen3_moe.apply_rotary_pos_emb
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(autouse=True)
def own_state(stock_hosts: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rotary, "DEVICES", set(DEVICES))
    monkeypatch.setattr(rotary, "_agree", {})
    for code in (modeling_qwen3_moe, modeling_deepseek_v3):
        monkeypatch.setattr(code, "apply_rotary_pos_emb", code.apply_rotary_pos_emb)  # put back afterwards
    yield
    hosts.undo()  # before what the test patched is put back


def inputs(device: str, dtype: torch.dtype, unsqueeze_dim: int = 1, size: int = 32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 7, heads, size, device=device, dtype=dtype) for heads in (6, 2))
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    angles = torch.rand(2, 7, size, device=device) * 9
    return q.requires_grad_(), k.requires_grad_(), angles.cos().to(dtype), angles.sin().to(dtype)


def run(function: Any, given: tuple[Tensor, ...], *more: Any) -> list[Tensor]:
    outs = function(*given, *more)
    loss = sum(out.double().square().sum() * weight for out, weight in zip(outs, (1, 3), strict=True))
    assert isinstance(loss, Tensor)
    return [*outs, *torch.autograd.grad(loss, given[:2])]


def model_of(code: ModuleType) -> nn.Module:
    """A module of that code."""
    model = nn.Module()
    model.__class__ = type("Layer", (nn.Module,), {"__module__": code.__name__})
    return model


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
def test_it_gives_what_transformers_gives(
    device: str, dtype: torch.dtype, unsqueeze_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rotary.fuse_rotary(model_of(modeling_qwen3_moe))
    fused = modeling_qwen3_moe.apply_rotary_pos_emb
    assert fused is not PLAIN
    given = inputs(device, dtype, unsqueeze_dim)
    found, expected = run(fused, given, unsqueeze_dim), run(PLAIN, given, unsqueeze_dim)
    bound = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).norm() <= bound * theirs.norm()
    assert "_Rotation" in type(found[0].grad_fn).__name__
    assert list(rotary._agree.values()) == [True]
    hosts.undo()
    assert modeling_qwen3_moe.apply_rotary_pos_emb is PLAIN


def test_it_is_the_gradient_of_its_forward() -> None:
    q, _, cos, sin = (tensor.detach().double()[:1] for tensor in inputs("cpu", torch.float32, size=8))
    cos, sin = cos[:, None], sin[:, None]
    assert torch.autograd.gradcheck(lambda x: rotary._Rotation.apply(x, cos, sin), q.requires_grad_())


def test_another_rotation_stays_as_it_is() -> None:
    def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        q, k = (t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for t in (q, k))
        return PLAIN(q, k, cos, sin, unsqueeze_dim)

    modeling_deepseek_v3.apply_rotary_pos_emb = interleaved
    rotary.fuse_rotary(model_of(modeling_deepseek_v3))
    fused = modeling_deepseek_v3.apply_rotary_pos_emb
    given = inputs("cpu", torch.float32)
    for _ in range(2):
        assert all(map(torch.equal, run(fused, given), run(interleaved, given)))
    assert list(rotary._agree.values()) == [False]


@pytest.mark.parametrize("change", ["device", "part of a head", "dtype", "trained"])
def test_what_is_not_usual_goes_the_models_own_way(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def plain(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        seen.append((q, k, cos, sin, unsqueeze_dim))
        return q, k

    modeling_qwen3_moe.apply_rotary_pos_emb = plain
    rotary.fuse_rotary(model_of(modeling_qwen3_moe))
    fused = modeling_qwen3_moe.apply_rotary_pos_emb
    rotary.fuse_rotary(model_of(modeling_qwen3_moe))
    assert modeling_qwen3_moe.apply_rotary_pos_emb is fused
    q, k, cos, sin = inputs("cpu", torch.float32)
    if change == "device":
        monkeypatch.setattr(rotary, "DEVICES", {"cuda"})
    if change == "part of a head":
        cos, sin = cos[..., :16], sin[..., :16]
    if change == "dtype":
        cos, sin = cos.double(), sin.double()
    if change == "trained":
        cos.requires_grad_()
    modeling_qwen3_moe.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    ((*tensors, unsqueeze_dim),) = seen
    assert all(mine is given for mine, given in zip(tensors, (q, k, cos, sin), strict=True))
    assert unsqueeze_dim == 2 and not rotary._agree


def test_code_with_other_parameters_is_left_alone() -> None:
    def by_positions(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        return PLAIN(q, k, cos[position_ids], sin[position_ids])

    def without_keys(q: Tensor, k: Any = None, cos: Any = None, sin: Any = None, unsqueeze_dim: int = 1) -> Any:
        return PLAIN(q, q if k is None else k, cos, sin, unsqueeze_dim)

    for other in (by_positions, without_keys):
        modeling_qwen3_moe.apply_rotary_pos_emb = other
        rotary.fuse_rotary(model_of(modeling_qwen3_moe))
        assert modeling_qwen3_moe.apply_rotary_pos_emb is other


def test_heads_of_another_size_are_compared_again() -> None:
    def odd(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = PLAIN(q, k, cos, sin, unsqueeze_dim)
        return found if q.shape[-1] == 32 else (found[0] * 2, found[1])

    code = ModuleType("odd_code")
    code.apply_rotary_pos_emb = odd  # type: ignore[attr-defined]
    sys.modules[code.__name__] = code
    try:
        rotary.fuse_rotary(model_of(code))
    finally:
        del sys.modules[code.__name__]
    for size in (32, 16):
        given = inputs("cpu", torch.float32, size=size)
        for mine, theirs in zip(code.apply_rotary_pos_emb(*given), odd(*given), strict=True):  # type: ignore[attr-defined]
            assert torch.allclose(mine, theirs, atol=1e-5)
