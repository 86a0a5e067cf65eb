"""AdamW's kernel against torch's: every tail size, instruction set, thread count and NUMA split, and bad input."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from ktft import native
from ktft.native.optim import adamw, scale

SIZES = (*range(1, 101), 2047, 2049, 4097, 32767, 32769, 70001)
OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
VECTOR_ISAS = [isa for isa in native.isas() if isa not in ("amx_emu", "scalar")]


def random_tensors(sizes: Iterable[int], dtype: torch.dtype, spread: float = 0.0) -> list[Tensor]:
    """Normal numbers, each times a power of ten from -spread to 0."""
    return [(torch.randn(n) * 10 ** (-spread * torch.rand(n))).to(dtype) for n in sizes]


def gradients(sizes: Iterable[int], dtype: torch.dtype) -> list[Tensor]:
    return random_tensors(sizes, dtype, spread=6)


class Native:
    """Tensors updated by the kernel."""

    def __init__(self, params: list[Tensor], runtime: native.Runtime) -> None:
        self.params, self.runtime, self.step_count = [p.clone() for p in params], runtime, 0
        self.exp_avgs, self.exp_avg_sqs = ([torch.zeros_like(p) for p in params] for _ in range(2))

    def step(self, grads: list[Tensor], **options: Any) -> None:
        self.step_count += 1
        steps = [float(self.step_count)] * len(grads)
        adamw(self.runtime, self.params, grads, self.exp_avgs, self.exp_avg_sqs, steps, **OPTIONS | options)

    def tensors(self) -> list[Tensor]:
        return [*self.params, *self.exp_avgs, *self.exp_avg_sqs]


class Torch:
    """The same tensors updated by torch."""

    def __init__(self, params: list[Tensor], dtype: torch.dtype | None = None, **options: Any) -> None:
        self.params = [p.to(dtype or p.dtype, copy=True).requires_grad_() for p in params]
        self.optimizer = torch.optim.AdamW(self.params, **OPTIONS | options)

    def step(self, grads: list[Tensor]) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad.to(p.dtype, copy=True)
        self.optimizer.step()

    def tensors(self) -> list[Tensor]:
        state = [self.optimizer.state[p] for p in self.params]
        return [t.detach() for t in self.params] + [s[name] for name in ("exp_avg", "exp_avg_sq") for s in state]


@pytest.mark.parametrize("isa", native.isas())
def test_fp32_is_as_exact_as_torch(isa: str) -> None:
    torch.manual_seed(0)
    params = random_tensors(SIZES, torch.float32)
    ours, theirs = Native(params, native.runtime(2, isa=isa)), Torch(params, foreach=False)
    exact = Torch(params, torch.float64, foreach=False)
    for _ in range(30):
        grads = gradients(SIZES, torch.float32)
        ours.step(grads)
        theirs.step(grads)
        exact.step(grads)
    for mine, its, truth in zip(ours.tensors(), theirs.tensors(), exact.tensors(), strict=True):
        off, allowed = (mine - truth).abs().max(), (its - truth).abs().max()
        # one rounding of the largest value: with few elements torch may be exact by chance
        assert off <= 1.5 * allowed + 2**-22 * truth.abs().max(), (len(mine), off, allowed)
        assert (mine - its).abs().max() <= 3e-6 * max(1, truth.abs().max())


@pytest.mark.parametrize("isa", native.isas())
def test_bf16_is_torchs_fused_to_one_rounding(isa: str) -> None:
    torch.manual_seed(0)
    params = random_tensors(SIZES, torch.bfloat16)
    ours, theirs = Native(params, native.runtime(2, isa=isa)), Torch(params, fused=True)
    same = count = 0
    for _ in range(5):
        grads = gradients(SIZES, torch.bfloat16)
        ours.step(grads)
        theirs.step(grads)
        for mine, its in zip(ours.tensors(), theirs.tensors(), strict=True):
            torch.testing.assert_close(mine, its, rtol=2**-7, atol=1e-7)  # exp_avg may cancel
            same, count = same + int((mine == its).sum()), count + len(mine)
            mine.copy_(its)
    assert same > 0.999 * count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_whatever_threads_nodes_and_vector_isa(dtype: torch.dtype) -> None:
    results = []
    isas = VECTOR_ISAS or native.isas()
    for threads, nodes, isa in [(1, 1, isas[-1]), (2, 1, isas[-1]), (5, 2, isas[-1]), *((2, 1, isa) for isa in isas)]:
        torch.manual_seed(0)
        ours = Native(random_tensors(SIZES, dtype), native.runtime(threads, nodes, isa))
        for _ in range(4):
            ours.step(gradients(SIZES, dtype))
        results.append(ours.tensors())
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])
    # nor how a tensor is cut: the same elements as one tensor, and in pieces of odd lengths
    torch.manual_seed(0)
    (whole,), grads = random_tensors([5000], dtype), [gradients([5000], dtype)[0] for _ in range(3)]
    lengths = [1, 7, 992, 4000]
    one, pieces = (Native(p, native.runtime(2)) for p in ([whole], [p.clone() for p in whole.split(lengths)]))
    for grad in grads:
        one.step([grad])
        pieces.step([g.clone() for g in grad.split(lengths)])
    assert torch.equal(one.params[0], torch.cat(pieces.params))


@pytest.mark.parametrize(
    ("options", "seen_before"),
    [
        ({"weight_decay": 0.0}, False),
        ({"weight_decay": 0.0}, True),
        ({}, False),
        ({"eps": 0.0, "weight_decay": 0.0}, False),
    ],
    ids=["rests", "moments", "weight-decay", "eps-0"],
)
def test_parts_without_gradient(options: dict[str, Any], seen_before: bool) -> None:
    """Half of a tensor's experts see no tokens. The result is torch's, whether or not these stand still."""
    torch.manual_seed(0)
    params = random_tensors([16 * 3000], torch.float32)
    ours, theirs = Native(params, native.runtime(2)), Torch(params, foreach=False, **options)
    for step in range(3):
        grads = gradients([16 * 3000], torch.float32)
        if step or not seen_before:
            grads[0][: 8 * 3000] = 0
        ours.step(grads, **options)
        theirs.step(grads)
    unseen = ours.params[0][: 8 * 3000]
    torch.testing.assert_close(ours.params[0], theirs.params[0].detach(), rtol=1e-5, atol=1e-6, equal_nan=True)
    stands_still = not seen_before and options.get("eps") != 0 and "weight_decay" in options
    assert torch.equal(unseen, params[0][: 8 * 3000]) == stands_still


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factor", [0.37, torch.nan])
def test_a_factor_of_the_gradients(dtype: torch.dtype, factor: float) -> None:
    """The bits of gradients that were multiplied before; these stay as they are, also where they are zero."""
    torch.manual_seed(0)
    params, grads = random_tensors(SIZES, dtype), gradients(SIZES, dtype)
    grads[-1][2048:4096] = 0
    runtime, before = native.runtime(2), [grad.clone() for grad in grads]
    ours, theirs = (Native(params, runtime) for _ in range(2))
    ours.step(grads, grad_factor=factor, weight_decay=0.0)
    assert all(map(torch.equal, grads, before))
    scale(runtime, grads, factor)
    theirs.step(grads, weight_decay=0.0)
    for found, expected in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(found, expected) or (found.isnan().all() and expected.isnan().all())


def test_kernel_refuses_tensors_that_do_not_match() -> None:
    p = torch.zeros(4, 3)
    cases = {
        "gradient is torch.float32 [3, 4]": (p, torch.zeros(3, 4), p, p),
        "exp_avg is torch.bfloat16": (p, p, p.bfloat16(), p),
        "parameter is torch.float16": (p.half(),) * 4,
        "exp_avg_sq is torch.float32 [4, 3] on meta": (p, p, p, p.to("meta")),
        "parameter is torch.float32 [3, 4]": (p.T, p.T, p.T, p.T),
    }
    for message, (param, grad, exp_avg, exp_avg_sq) in cases.items():
        with pytest.raises(ValueError, match=message.replace("[", r"\[")):
            adamw(native.runtime(1), [param], [grad], [exp_avg], [exp_avg_sq], [1.0], **OPTIONS)
    with pytest.raises(ValueError, match="zip"):
        adamw(native.runtime(1), [p], [p], [p], [p], [], **OPTIONS)
