"""Muon for the stacked LoRA of routed experts. One call orthogonalizes each expert's matrix by itself.

LLaMA-Factory's Muon takes two-dimensional parameters, and would leave expert LoRA, nearly all there is, to AdamW.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic Newton-Schulz iteration, as in LLaMA-Factory's Muon."""


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Muon's Newton-Schulz iteration on each of `matrices [E, rows, cols]`, in bf16. Zeros stay zeros."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def take_stacked(optimizer: Any, parameters: Iterable[Tensor]) -> None:
    """Make LLaMA-Factory's Muon update `parameters [E, rows, cols]` as E matrices each instead of by its AdamW."""
    optimizer.stacked = list(parameters)
    optimizer.__class__ = _stacked(type(optimizer))  # type: ignore[arg-type]  # mypy takes a class for unhashable
    for parameter in optimizer.stacked:
        optimizer.state[parameter]["use_muon"] = True


@functools.cache
def _stacked(base: Any) -> Any:
    """A subclass of `base`, LLaMA-Factory's Muon, that also updates the parameters in its attribute `stacked`."""

    def step(self: Any, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = {parameter: parameter.grad for parameter in self.stacked if parameter.grad is not None}
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter in gradients:
                        _update(group, self.state[parameter], parameter, gradients[parameter])
        try:
            for parameter in gradients:
                parameter.grad = None  # `base` skips parameters without a gradient
            base.step(self)
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
        return loss

    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        base.load_state_dict(self, state_dict)
        if not all(self.state[parameter].get("use_muon") for parameter in self.stacked):
            raise ValueError(
                "the checkpoint's optimizer moved the LoRA of routed experts by AdamW, not by Muon; go on without "
                "use_muon, or start from its adapter alone with adapter_name_or_path"
            )

    return type(f"Stacked{base.__name__}", (base,), {"step": step, "load_state_dict": load_state_dict})


def _update(group: dict[str, Any], state: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    momentum = state["momentum_buffer"]
    momentum.mul_(group["momentum"]).add_(gradient)
    ahead = gradient.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
    update = orthogonalize(ahead, group["ns_steps"])
    rate = group["lr"] * 0.2 * math.sqrt(max(parameter.shape[1:]))
    parameter.mul_(1 - group["lr"] * group["wd"]).add_(update, alpha=-rate)
