"""The choice of experts by a router's logits, compared with torch's."""

from __future__ import annotations

import pytest
import torch

from ktft import native
from ktft.native.routing import choose_experts


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 128, 8), (37, 60, 4), (16, 8, 8), (3, 5, 1), (0, 8, 2)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_choice(tokens: int, experts: int, top_k: int, renormalize: bool) -> None:
    logits = (torch.randn(tokens, experts, generator=torch.Generator().manual_seed(3)) * 3).bfloat16()
    weights, chosen = choose_experts(native.runtime(threads=2), logits, top_k, renormalize)
    order = logits.float().sort(descending=True, stable=True)
    shares = logits.float().softmax(-1).gather(1, order.indices[:, :top_k])
    if renormalize:
        shares /= shares.sum(-1, keepdim=True)
    assert torch.equal(chosen, order.indices[:, :top_k])
    torch.testing.assert_close(weights, shares, rtol=1e-5, atol=1e-7)


def test_equal_logits_and_nan() -> None:
    """Whatever the logits, the experts exist and differ; NaN does not vanish."""
    logits = torch.zeros(4, 8, dtype=torch.bfloat16)
    logits[1, 2] = torch.nan
    logits[2] = torch.nan
    logits[3] = -torch.inf
    weights, chosen = choose_experts(native.runtime(threads=1), logits, 3, False)
    assert all(len(set(row)) == 3 and set(row) <= set(range(8)) for row in chosen.tolist())
    assert chosen[0].tolist() == [0, 1, 2] and weights[0].tolist() == [0.125] * 3
    assert weights[1:].isnan().all()


@pytest.mark.parametrize(
    ("logits", "top_k", "message"),
    [
        (torch.zeros(2, 4), 2, r"torch.float32 \[2, 4\]"),
        (torch.zeros(4, dtype=torch.bfloat16), 2, r"torch.bfloat16 \[4\]"),
        (torch.zeros(2, 4, dtype=torch.bfloat16), 5, "top_k is 5, but there are 4 experts"),
        (torch.zeros(2, 4, dtype=torch.bfloat16), 0, "top_k is 0"),
    ],
)
def test_refusals(logits: torch.Tensor, top_k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_experts(native.runtime(threads=1), logits, top_k, True)
