"""What transformers' stacked experts compute, found by running small ones: no setting or name has to be believed."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ktft.swiglu import GELU_TANH, SILU, Swiglu

_HIDDEN, _INTERMEDIATE, _TOKENS = 6, 5, 8
_TOLERANCE = 1e-5  # of each token: GELU and its approximation are 1e-4 apart, and some activations compute in fp32


def activation_of(experts: nn.Module, transposed: bool) -> Swiglu | None:
    """The activation with which stock experts are the usual weighted sum of gated experts; None if none fits.

    Args:
        experts: with no parameters but gate_up_proj and down_proj, and a forward as transformers 5 calls it. They may
            be on the meta device: their code runs on small random weights of its own.
        transposed: whether the matrices are `[E, in, out]`.
    """
    with torch.no_grad(), torch.device("cpu"):  # whoever asks may be making a model on the meta device
        return _measured(experts, transposed)


def _measured(experts: nn.Module, transposed: bool) -> Swiglu | None:
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    count = len(experts.get_parameter("down_proj"))
    # Large enough that any limit on gates or ups is reached
    gate_up, down = 4 * random(count, 2 * _INTERMEDIATE, _HIDDEN), random(count, _HIDDEN, _INTERMEDIATE)
    given = {"gate_up_proj": gate_up, "down_proj": down}
    small: Any = copy.copy(experts)
    small.__dict__["_parameters"] = {
        name: nn.Parameter(each.mT.contiguous() if transposed else each, requires_grad=False)
        for name, each in given.items()
    }
    index = torch.stack([torch.randperm(count, generator=generator)[:2] for _ in range(_TOKENS)])
    # Half of them small, as differences of activations are seen near 0, and limits far from it
    hidden = random(_TOKENS, _HIDDEN) * torch.tensor([0.1, 1.0]).repeat(_TOKENS // 2)[:, None]
    weights = random(*index.shape)
    forward = inspect.unwrap(type(experts).forward)  # not one of transformers' other implementations
    try:
        found, gated = forward(small, hidden, index, weights), small._apply_gate(hidden @ gate_up[0].mT)
    except Exception:  # whatever their code does not do with small weights, these are not the usual experts
        return None
    for swiglu in _candidates(experts):
        expected = torch.zeros_like(hidden)
        for token, slot in itertools.product(range(_TOKENS), range(index.shape[1])):
            expert = index[token, slot]
            inner = activate(swiglu, gate_up[expert] @ hidden[token])
            expected[token] += weights[token, slot] * (down[expert] @ inner)
        if _same(found, expected) and _same(gated, activate(swiglu, hidden @ gate_up[0].mT)):
            return swiglu
    return None


def activate(swiglu: Swiglu, gate_up: Tensor) -> Tensor:
    """The activation of rows, gates before ups."""
    gate, up = gate_up.chunk(2, dim=-1)
    g, u = gate.clamp(max=swiglu.gate_most), up.clamp(-swiglu.limit, swiglu.limit)
    return g * torch.sigmoid(swiglu.alpha * g + swiglu.cubic * g**3) * (u + swiglu.shift)


def _candidates(experts: nn.Module) -> Iterator[Swiglu]:
    """SiLU, GELU, and SiLU with what the experts have as limit and alpha."""
    yield from (SILU, GELU_TANH)
    numbers = {name: float(n) for name, n in vars(experts).items() if isinstance(n, int | float)}
    limits = {n for name, n in numbers.items() if ("limit" in name or "clamp" in name) and n > 0}
    alphas = {1.0, *(n for name, n in numbers.items() if "alpha" in name)}
    for limit, alpha, shift in itertools.product(limits, alphas, (0.0, 1.0)):
        yield Swiglu(alpha=alpha, limit=limit, shift=shift)


def _same(found: Tensor, expected: Tensor) -> bool:
    """Whether each row is the same."""
    if found.shape != expected.shape:
        return False
    return bool(((found - expected).norm(dim=-1) <= _TOLERANCE * expected.norm(dim=-1)).all())
