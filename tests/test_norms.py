"""Norms: RMSNorm by torch's fused kernel, and norms of gradients by many threads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from ktft import native
from ktft.model import norms
from ktft.native.norm import HostNorm
from ktft.native.optim import row_norms
from ktft.train.gradients import clip_grad_norm
from ktft.train.gradients import norms as norms_by_rows


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "DEVICES", {"cpu"})


def run(module: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden = hidden.detach().requires_grad_()
    with torch.autocast(hidden.device.type, dtype=torch.bfloat16):
        out = module(hidden)
    weight = module.weight
    assert isinstance(weight, Tensor)
    found = torch.autograd.grad(out.float().square().sum(), [hidden, weight])
    return out, *found


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_fused_norm_gives_what_transformers_gives(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norms, "DEVICES", {device})
    torch.manual_seed(0)
    stock = Qwen3MoeRMSNorm(96).to(device, dtype)
    nn.init.normal_(stock.weight, 1.0, 0.2)
    fused, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    exact.register_forward_pre_hook(lambda _, given: tuple(each.double() for each in given))
    norms.fuse_norms(fused)
    clone = copy.deepcopy(fused)
    for scale in (1e-3, 1.0, 300.0):
        hidden = (torch.randn(2, 7, 96) * scale).to(device, dtype)
        for mine, theirs, true in zip(run(fused, hidden), run(stock, hidden), run(exact, hidden), strict=True):
            assert mine.dtype == theirs.dtype
            ours, other = ((found.double() - true.double()).norm() / true.double().norm() for found in (mine, theirs))
            assert ours <= 1.2 * other + 1e-5  # sums run in another order, and `true` rounds to fp32 inside
    assert list(norms._agree[fused].values()) == [True]
    with torch.no_grad():
        clone.weight.mul_(2)
        assert torch.equal(clone(hidden), fused(hidden) * 2)


def test_on_a_cpu_a_norm_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As exact as transformers', unless the weight is trained, the type another one, or nobody said by what threads."""
    monkeypatch.setattr(norms, "DEVICES", {"cuda"})
    torch.manual_seed(0)
    stock = Qwen3MoeRMSNorm(96).bfloat16()
    nn.init.normal_(stock.weight, 1.0, 0.2)
    stock.requires_grad_(False)
    fused, exact = copy.deepcopy(stock), copy.deepcopy(stock).double()
    norms.fuse_norms(fused, native.runtime)
    calls: list[str] = []
    original = HostNorm.__call__
    monkeypatch.setattr(HostNorm, "__call__", lambda *args: calls.append("kernel") or original(*args))
    for module in (fused, copy.deepcopy(fused)):
        for scale in (1e-3, 1.0, 300.0):
            given = (torch.randn(2, 7, 3, 96) * scale).bfloat16().transpose(1, 2)
            found = []
            for norm, x in ((module, given), (stock, given), (exact, given.double())):
                x = x.detach().requires_grad_()
                (norm(x).double() * torch.linspace(-1, 1, 96)).sum().backward()
                found.append((norm(x).detach().double(), x.grad.double()))  # type: ignore[union-attr]
            for mine, theirs, true in zip(*found, strict=True):
                ours, other = ((each - true).norm() / true.norm() for each in (mine, theirs))
                assert ours <= 1.2 * other + 1e-5
    assert len(calls) == 2 * (1 + 3 * 2)  # the first time it is compared
    del calls[:]
    for change in (lambda module: module.requires_grad_(), lambda module: module.float()):
        other = copy.deepcopy(fused)
        change(other)
        hidden = torch.randn(5, 96).to(other.weight.dtype)
        assert torch.equal(other(hidden), Qwen3MoeRMSNorm.forward(other, hidden))
    assert not calls


def test_another_formula_stays_as_it_is() -> None:
    module = GemmaRMSNorm(32)
    nn.init.normal_(module.weight)
    norms.fuse_norms(module)
    hidden = torch.randn(5, 32)
    assert torch.equal(module(hidden), GemmaRMSNorm.forward(module, hidden))
    assert list(norms._agree[module].values()) == [False]


def test_elsewhere_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms, "DEVICES", {"cuda"})
    module = Qwen3MoeRMSNorm(32).bfloat16()
    norms.fuse_norms(module)
    hidden = torch.randn(5, 32, dtype=torch.bfloat16)
    assert torch.equal(module(hidden), Qwen3MoeRMSNorm.forward(module, hidden)) and module not in norms._agree


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("most", "written"), [(0.5, True), (1e4, False)])
def test_clipping_is_torchs(most: float, written: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    mine = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size in ((8, 33), (70001,), (1,), (0,))]
    for parameter in mine:
        parameter.grad = torch.randn_like(parameter)
    theirs = copy.deepcopy(mine)
    for parameter, own in zip(theirs, mine, strict=True):
        parameter.grad = own.grad.clone()
    mine.append(nn.Parameter(torch.zeros(3)))  # without a gradient
    versions = [parameter.grad._version for parameter in mine if parameter.grad is not None]
    norm, _ = clip_grad_norm(iter(mine), most, native.runtime())
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    expected = torch.nn.utils.clip_grad_norm_(theirs, most)
    torch.testing.assert_close(norm, expected, rtol=bound, atol=0, check_dtype=False)
    for own, other in zip(mine, theirs, strict=False):
        torch.testing.assert_close(own.grad, other.grad, rtol=bound, atol=0)
    after = [parameter.grad._version for parameter in mine if parameter.grad is not None]
    assert (after != versions) == written


def test_a_norm_that_is_not_finite_clips_as_torch_does() -> None:
    parameter, runtime = nn.Parameter(torch.zeros(2)), native.runtime()
    parameter.grad = torch.tensor([1.0, float("nan")])
    assert clip_grad_norm([parameter], 1.0, runtime)[0].isnan() and parameter.grad.isnan().all()
    parameter.grad = torch.tensor([1.0, float("inf")])
    assert clip_grad_norm([parameter], 1.0, runtime)[0].isinf() and parameter.grad.isnan().tolist() == [False, True]
    assert float(clip_grad_norm([nn.Parameter(torch.zeros(2))], 1.0, runtime)[0]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_rows_of_any_size(dtype: torch.dtype) -> None:
    sizes = [(0, 5), (3, 0), (1, 1), (2, 7), (5, 8), (1, 70001), (3, 32768), (2, 32769), (128, 17)]
    tensors = [(torch.randn(size) * 10 ** (4 * torch.rand(size))).to(dtype) for size in sizes]
    tensors[3][1, 2] = float("nan")
    tensors[4][0, 0] = 3e38  # whose square is no fp32
    strided = torch.randn(64, 9).to(dtype)[::2]
    found = [norms_by_rows(native.runtime(n), [*tensors, strided, tensors[3].half()]) for n in (1, 2)]
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)
    for rows, norm in zip([*tensors, strided], found[0], strict=False):
        assert norm.dtype == torch.float32 and norm.shape == (len(rows),)
        expected = torch.linalg.vector_norm(rows.double(), dim=1).float()
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0, equal_nan=True)


def test_what_the_kernel_does_not_take() -> None:
    half = torch.zeros(2, 2, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"norms are of contiguous two-dim.* got torch.float16 \[2, 2\] on cpu"):
        row_norms(native.runtime(), [half])
    with pytest.raises(ValueError, match=r"got torch.float32 \[3\]"):
        row_norms(native.runtime(), [torch.zeros(3)])
    assert row_norms(native.runtime(), []) == []


class OddRMSNorm(Qwen3MoeRMSNorm):  # type: ignore[misc]
    """Has transformers' formula with a bf16 weight, and another one with a weight that was cast to fp32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = super().forward(hidden_states)
        return out if self.weight.dtype == torch.bfloat16 else out * 3


def test_a_norm_that_was_cast_is_compared_again() -> None:
    fused = OddRMSNorm(64).bfloat16()
    norms.fuse_norms(fused)
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert torch.allclose(fused(hidden), OddRMSNorm(64).bfloat16()(hidden), rtol=2.0**-6)
    fused.float()
    assert torch.equal(fused(hidden), OddRMSNorm(64)(hidden))
