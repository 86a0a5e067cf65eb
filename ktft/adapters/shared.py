"""LoRA that a layer's experts share, shared-outer: one A for gate and one for up, one B for down, for all experts.

These are the sides of the hidden states, which all experts read and write; the inner sides stay each expert's own.
Kernels and lanes take a matrix for each expert, so a shared one is spread over `[E, ...]`, once an update.

On disk a shared matrix is `[1, ...]` under a name without an expert's number, which is how Megatron-Bridge writes and
SGLang reads it; an expert's own matrices keep their standard names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ktft.config import PER_EXPERT, PROJECTIONS, SHARED_OUTER
from ktft.lanes.gpu.lane import adapters_at_rest
from ktft.lanes.lanes import tell_hooks
from ktft.native.repeated import repeated

SHARED = {"gate_proj": "lora_A", "up_proj": "lora_A", "down_proj": "lora_B"}
"""Projection -> which of its two matrices all experts share in an adapter that is shared-outer."""

_SHARED_NAME = re.compile(rf"\.experts\.(?:{'|'.join(PROJECTIONS)})\.lora_[AB]\.weight$")
_OUTER_NAME = re.compile(
    rf"\.experts\.(?:\d+\.)?(?:{'|'.join(rf'{name}.{kind}' for name, kind in SHARED.items())})\.weight$"
)
_WORDS = {2: torch.int16, 4: torch.int32}


def is_shared(form: str, projection: str, kind: str) -> bool:
    """Whether `lora_A` or `lora_B` of a projection is one matrix for all experts in an adapter of this form."""
    return form == SHARED_OUTER and SHARED[projection] == kind


def form_of(names: Iterable[str]) -> str:
    """The form of an adapter by the names of its tensors, one of `EXPERT_LORA`; `PER_EXPERT` without LoRA on experts.

    One shared name makes it shared-outer, so that a comparison of names then tells what is missing or left over.
    """
    return SHARED_OUTER if any(map(_SHARED_NAME.search, names)) else PER_EXPERT


def check_form(directory: Path, names: Collection[str], expected: str | None, adapter_name: str) -> str:
    """The form of a saved adapter with tensors of these names. `expected` is None if any form will do.

    Raises:
        ValueError: the adapter has LoRA on experts in another form than the expected one.
    """
    found, outer = form_of(names), sorted(filter(_OUTER_NAME.search, names))
    if not outer or expected in (None, found):
        return found
    which = {SHARED_OUTER: "one matrix for all experts of a layer", PER_EXPERT: "a matrix of one expert"}
    raise ValueError(
        f"{directory} was trained with expert_lora: {found} ({outer[0]} is {which[found]}), adapter {adapter_name!r} "
        f"here has expert_lora: {expected} ({which[expected]}); set expert_lora: {found} in kt_config (KtftConfig), or "
        "begin a new adapter"
    )


class Spread:
    """A shared matrix as the kernels take it, with a row for each expert, and its gradient's way back.

    Attributes:
        tensor: `[E, ...]`, of little more memory than a row where rows are whole pages. It is a leaf: lanes tell
            adapters by their tensors, copy them from locked memory, and deliver gradients to them late, none of which a
            view that autograd makes anew in each call would allow. Its gradient goes to the parameter at once, summed
            over the experts, and the parameter's own hooks then run.
    """

    def __init__(self, parameter: nn.Parameter, experts: int) -> None:
        self.parameter = parameter
        with torch.inference_mode(False), torch.no_grad():
            self.tensor, self._distinct = repeated(experts, tuple(parameter.shape[1:]), parameter.dtype)
            self._write()
            self.tensor.requires_grad_()  # a tensor without gradients takes no hook
        self.tensor.register_post_accumulate_grad_hook(partial(_return_gradient, parameter))

    def fits(self, parameter: nn.Parameter, experts: int) -> bool:
        """Whether this is the spread of a parameter as it is now, apart from its values."""
        shape = (experts, *parameter.shape[1:])
        return self.parameter is parameter and (self.tensor.shape, self.tensor.dtype) == (shape, parameter.dtype)

    def now(self) -> Tensor:
        """The tensor with the parameter's present values, which are compared: writes through `data` have no version."""
        if self.tensor.requires_grad != self.parameter.requires_grad:
            self.tensor.requires_grad_(self.parameter.requires_grad)
        row, spread = _words(self.parameter), _words(self.tensor)
        if not (spread[0] == row[0]).all():
            with adapters_at_rest():
                self._write()
            torch.autograd.graph.increment_version(self.tensor)
        return self.tensor

    def _write(self) -> None:
        _words(self.tensor)[: self._distinct] = _words(self.parameter)


def _words(tensor: Tensor) -> Any:
    """The bits as numpy's integers: NaN equals itself, bf16 has a type, and none of torch's threads wakes to spin."""
    return tensor.detach().contiguous().view(_WORDS[tensor.element_size()]).numpy()


@torch.no_grad()
def _return_gradient(parameter: nn.Parameter, spread: Tensor) -> None:
    grad, spread.grad = spread.grad, None
    if grad is None or not parameter.requires_grad:
        return
    total = grad.sum(0, keepdim=True, dtype=torch.float32).to(parameter.dtype)
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(total)
        total = total if changed is None else changed
    if parameter.grad is None:
        parameter.grad = total
    else:
        parameter.grad += total
    tell_hooks(parameter)


class Spreads:
    """The spreads of one layer's shared matrices, each made when it is first needed. A copied layer makes its own."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, str], Spread] = {}

    def of(self, key: tuple[str, str, str], parameter: nn.Parameter, experts: int) -> Tensor:
        """The spread of a parameter; the key is (`lora_A` or `lora_B`, adapter, projection)."""
        found = self._made.get(key)
        if found is None or not found.fits(parameter, experts):
            found = self._made[key] = Spread(parameter, experts)
        return found.now()

    def drop(self, adapter_name: str) -> None:
        """Free those of an adapter."""
        self._made = {key: spread for key, spread in self._made.items() if key[1] != adapter_name}

    def __deepcopy__(self, memo: dict[int, Any]) -> Spreads:
        return Spreads()

    def __getstate__(self) -> dict[str, Any]:
        return {"_made": {}}
