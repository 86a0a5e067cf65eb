"""Products of few tokens with a packed linear weight: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from interpreted import DEVICE, bf16_in_the_interpreter
from packed_weights import check

from ktft.serve.runtime import triton_linear
from ktft.serve.runtime.settings import SERVED_DENSE_FORMATS

__all__ = ["bf16_in_the_interpreter"]


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("format", SERVED_DENSE_FORMATS)
def test_few_tokens(format: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, product = [], triton_linear.product
    monkeypatch.setattr("ktft.serve.runtime.packed_weight.few_tokens", lambda device: triton_linear)
    monkeypatch.setattr(
        triton_linear, "product", lambda weight, x, bias: asked.append(len(x)) or product(weight, x, bias)
    )
    check(format, (48, 288), tokens, DEVICE)
    check(format, (32, 544), tokens, DEVICE, biased=True)
    assert asked.count(tokens) >= 4, "they are not decoded"
