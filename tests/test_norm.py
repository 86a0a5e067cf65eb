"""RMS norm on the CPU, compared with torch's in fp32."""

from __future__ import annotations

import pytest
import torch
from contract import CASES
from torch import Tensor

from ktft import native
from ktft.native.norm import HostNorm

ISAS = sorted({isa for isa, _ in CASES})


def expected(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.float()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 48), (9, 1040), (0, 32)])
def test_norm(isa: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    x, residual = torch.randn(2, *shape, generator=generator).bfloat16()
    weight = torch.randn(shape[-1], generator=generator).bfloat16()
    norm = HostNorm(native.runtime(isa=isa, threads=2), weight, 1e-6)
    torch.testing.assert_close(norm(x).float(), expected(x, weight), rtol=2**-7, atol=1e-6)
    both = x.float() + residual.float()
    found = norm(x, residual)
    assert torch.equal(residual, both.bfloat16())
    torch.testing.assert_close(found.float(), expected(both, weight), rtol=2**-6, atol=1e-2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 48), (700, 32), (9, 1040), (0, 32)])
def test_backward(isa: str, shape: tuple[int, ...]) -> None:
    """Rows of many sizes of values, in more tasks than threads."""
    generator = torch.Generator().manual_seed(3)
    x, grad = (
        torch.randn(2, *shape, generator=generator) * 10 ** torch.randn(*shape[:-1], 1, generator=generator)
    ).bfloat16()
    weight = torch.randn(shape[-1], generator=generator).bfloat16()
    wide = x.float().requires_grad_()
    expected(wide, weight).backward(grad.float())
    assert wide.grad is not None
    norm = HostNorm(native.runtime(isa=isa, threads=2), weight, 1e-6)
    found = norm.backward(x, grad).float()
    size = wide.grad.abs().amax(-1, keepdim=True)
    assert ((found - wide.grad).abs() <= 2**-8 * wide.grad.abs() + 1e-5 * size).all()
    with pytest.raises(ValueError, match="of one shape in CPU memory, got torch.bfloat16"):
        norm.backward(x, grad[..., :16] if shape[-1] > 16 else grad[None])


def test_strides_and_nan() -> None:
    norm = HostNorm(native.runtime(threads=1), torch.ones(16, dtype=torch.bfloat16), 1e-6)
    x = torch.randn(16, 6).bfloat16()
    assert torch.equal(norm(x.T), norm(x.T.contiguous()))
    x[3, 2] = torch.nan
    assert norm(x.T).isnan().any(1).tolist() == [row == 2 for row in range(6)]


@pytest.mark.parametrize(
    ("x", "residual", "message"),
    [
        (torch.zeros(2, 16), None, "torch.float32"),
        (torch.zeros(2, 32, dtype=torch.bfloat16), None, r"\[2, 32\]"),
        (torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(1, 16, dtype=torch.bfloat16), r"\[1, 16\]"),
        (torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(16, 2, dtype=torch.bfloat16).T, r"\(1, 2\)"),
    ],
)
def test_refusals(x: Tensor, residual: Tensor | None, message: str) -> None:
    norm = HostNorm(native.runtime(threads=1), torch.ones(16, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(ValueError, match=message):
        norm(x, residual)


@pytest.mark.parametrize("weight", [torch.ones(16), torch.ones(24, dtype=torch.bfloat16), torch.ones(0).bfloat16()])
def test_weights_that_do_not_fit(weight: Tensor) -> None:
    with pytest.raises(ValueError, match="a norm's weight is bf16"):
        HostNorm(native.runtime(threads=1), weight, 1e-6)
