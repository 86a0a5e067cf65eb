"""Logits that are not computed yet, against real ones: whatever is done with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import convert_outputs_to_fp32
from chunks import CHUNK, IGNORED, WORDS, Largest
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ktft.model import lazy_logits
from ktft.model.lazy_logits import LazyLogits, LazyOutput


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_logits, "CHUNK_BYTES", 0)
    monkeypatch.setattr(lazy_logits, "_FEWEST_TOKENS", CHUNK)


class Passed(torch.autograd.Function):
    """What DDP does with a model's outputs, or a function of somebody's own: torch alone sees the logits."""

    @staticmethod
    def forward(ctx: Any, kind: str, logits: Tensor) -> Tensor:
        return logits if kind == "as they are" else logits.clone() if kind == "copied" else logits * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, 5 * grad


TARGETS = torch.randint(WORDS, (3, 20), generator=torch.Generator().manual_seed(4))
TARGETS[:, :8] = IGNORED
FLAT, SHIFTED = TARGETS.flatten(), TARGETS[:, 1:].flatten()
NONE = torch.full_like(TARGETS, IGNORED)
MASK = torch.arange(60).view(3, 20) % 3 == 0


def after_view_in_place(logits: Tensor) -> Tensor:
    logits[:, :-1].div_(3)
    return logits**2


def after_change(logits: Tensor) -> Tensor:
    logits.div_(3)
    return F.cross_entropy(logits.view(-1, WORDS), FLAT)


LAZY: dict[str, Callable[[Any], Tensor]] = {
    "causal": lambda o: ForCausalLMLoss(o, TARGETS, WORDS),
    "items": lambda o: ForCausalLMLoss(o, TARGETS, WORDS, num_items_in_batch=77),
    "shifted labels": lambda o: ForCausalLMLoss(o, None, WORDS, shift_labels=TARGETS),
    "another index": lambda o: ForCausalLMLoss(o, TARGETS.clamp(min=0), WORDS, ignore_index=0),
    "nothing counts": lambda o: ForCausalLMLoss(o, NONE, WORDS),
    "nothing counts among items": lambda o: ForCausalLMLoss(o, NONE, WORDS, num_items_in_batch=5),
    "cap": lambda o: ForCausalLMLoss(torch.tanh(o / 3.0) * 3.0, TARGETS, WORDS),
    "each": lambda o: F.cross_entropy(o.float().view(-1, WORDS), FLAT, reduction="none"),
    "smoothed": lambda o: nn.CrossEntropyLoss(label_smoothing=0.2)(o.float().reshape(-1, WORDS), FLAT),
    "shifted": lambda o: F.cross_entropy(o.float()[..., :-1, :].contiguous().view(-1, WORDS), SHIFTED),
    "narrow": lambda o: F.cross_entropy(o.view(-1, WORDS), FLAT),
    "of a mask": lambda o: F.cross_entropy(o.float()[MASK], TARGETS[MASK]),
    "scaled": lambda o: F.cross_entropy((2 * o.detach().float() * 0.3 + 0 * o.sum())[0], TARGETS[0]),
}
REAL: dict[str, Callable[[Any], Tensor]] = {
    "log probabilities": lambda o: o[:, :-1].log_softmax(-1).gather(2, TARGETS[:, 1:].clamp(min=0).unsqueeze(2)),
    "transposed": lambda o: o.transpose(0, 1)[3:].tanh(),
    "a word": lambda o: o[:, :, 5],
    "some words": lambda o: o[..., 3:9] + o[..., [1]],
    "rows of a list": lambda o: o[[True, False, True]].float() * 2,
    "split": lambda o: torch.cat([F.log_softmax(each, -1) for each in o.reshape(-1, WORDS).split(7, dim=0)]),
    "flat": lambda o: o.flatten(0, 1).exp() + o.view(-1)[:1],
    "by a tensor": lambda o: o * torch.linspace(0, 1, WORDS, dtype=o.dtype),
    "weighted": lambda o: F.cross_entropy(o.view(-1, WORDS), FLAT, torch.linspace(1, 2, WORDS, dtype=o.dtype)),
    "transposed loss": lambda o: F.cross_entropy(o.transpose(1, 2), TARGETS),
    "in place": after_view_in_place,
    "changed": after_change,
    "looked at before": lambda o: ForCausalLMLoss(o.float() + 0 * o.mean(), TARGETS, WORDS),
    "passed": lambda o: ForCausalLMLoss(Passed.apply("as they are", o), TARGETS, WORDS),
    "passed as a copy": lambda o: ForCausalLMLoss(Passed.apply("copied", o), TARGETS, WORDS),
    "passed doubled": lambda o: Passed.apply("doubled", o) ** 2,
}


class Coded(nn.Linear):
    """A frozen layer whose weight is one byte an element."""

    def __init__(self, hidden: int, words: int) -> None:
        super().__init__(hidden, words, bias=False)
        codes = torch.randint(256, (words, hidden), generator=torch.Generator().manual_seed(3))
        self.weight = nn.Parameter(codes.to(torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight.to(x.dtype) - 128) / 400)


def of_head(forward: Callable[[Tensor], Tensor], use: Callable[[Any], Tensor], dtype: torch.dtype) -> list[Tensor]:
    """What somebody makes of logits, and the gradient of the hidden states."""
    torch.manual_seed(5)
    hidden = torch.randn(3, 20, 16).to(dtype).requires_grad_()
    out = use(forward(hidden * 1))
    out.sum().backward()
    assert hidden.grad is not None
    return [out.detach(), hidden.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use", LAZY | REAL)
def test_lazy_logits_are_as_real_ones(use: str, dtype: torch.dtype) -> None:
    head = Coded(16, WORDS)
    real = of_head(head, (LAZY | REAL)[use], dtype)
    with Largest() as largest:
        lazy = of_head(LazyOutput(head), (LAZY | REAL)[use], dtype)
    exact = use not in LAZY or dtype == torch.float32
    for one, other in zip(lazy, real, strict=True):
        assert one.dtype == other.dtype and type(one) is Tensor
        torch.testing.assert_close(
            one, other, rtol=1e-4 if exact else 0.02, atol=1e-6 if exact else 2e-4, equal_nan=True
        )
    assert (largest.rows <= CHUNK) == (use in LAZY and use != "scaled")


def test_prompts_have_no_logits() -> None:
    rows: list[int] = []
    head = nn.Linear(16, WORDS).requires_grad_(False)
    forward = head.forward
    head.forward = lambda x: rows.append(x.shape[:-1].numel()) or forward(x)  # type: ignore[method-assign,func-returns-value]
    loss = ForCausalLMLoss(LazyOutput(head)(torch.randn(3, 20, 16)), TARGETS, WORDS)
    assert loss > 0
    assert rows == [1, *[CHUNK] * 7, 1]  # the first tells the logits' dtype; 36 labels


def test_evaluation_computes_no_gradients() -> None:
    head, calls = LazyOutput(Coded(16, WORDS)), []
    head._forward = lambda x, forward=head._forward: calls.append(torch.is_grad_enabled()) or forward(x)
    hidden = torch.randn(3, 20, 16, requires_grad=True)
    with torch.no_grad():
        loss = ForCausalLMLoss(head(hidden), TARGETS, WORDS)
    with torch.inference_mode():
        same = ForCausalLMLoss(head(hidden), TARGETS, WORDS)
    assert loss == same and not loss.requires_grad
    assert not any(calls)


def test_best_words_are_found_in_chunks() -> None:
    head, hidden = Coded(16, WORDS), torch.randn(3, 20, 16)
    with Largest() as largest:
        found = LazyOutput(head)(hidden).detach().argmax(dim=-1)
    assert largest.rows == CHUNK
    assert torch.equal(found, head(hidden).argmax(-1))
    assert torch.equal(LazyOutput(head)(hidden).argmax(1), head(hidden).argmax(1))


def test_outputs_become_fp32_without_being_computed() -> None:
    """As accelerate makes them after a forward under autocast."""
    head = Coded(16, WORDS)
    hidden = torch.randn(3, 20, 16)

    def forward(hidden: Tensor) -> dict[str, Tensor]:
        return {"logits": LazyOutput(head)(hidden.bfloat16())}

    logits = convert_outputs_to_fp32(forward)(hidden)["logits"]
    assert isinstance(logits, LazyLogits) and not logits.computed and logits.dtype == torch.float32
    assert torch.equal(logits.exp(), head(hidden.bfloat16()).float().exp())


def test_logits_pass_through_autograd_without_being_computed() -> None:
    """As through DDP, which marks a model's outputs."""
    hidden = torch.randn(3, 20, 16, requires_grad=True)
    for kind in ("as they are", "copied"):
        with Largest() as largest:
            assert isinstance(Passed.apply(kind, LazyOutput(Coded(16, WORDS))(hidden * 1)), LazyLogits)
        assert largest.rows == 1, kind  # which told the logits' dtype


def test_the_loss_needs_no_copy_in_fp32() -> None:
    """A chunk's log-softmax reads bf16 and writes fp32, in one kernel on a GPU."""
    logits: Any = LazyOutput(Coded(16, WORDS))(torch.randn(3, 20, 16).bfloat16())
    assert (logits / 3).float()._recipe.unwidened.dtype == torch.bfloat16
    assert logits.float().bfloat16()._recipe.unwidened is None


def test_few_tokens_have_real_logits() -> None:
    assert type(LazyOutput(Coded(16, WORDS))(torch.randn(1, CHUNK, 16))) is Tensor
