"""Adapters in PEFT 0.18's layout for stacked experts, which is how transformers 5 holds experts.

For a stacked parameter `[E, d1, d2]`, PEFT adds `sum_r A[e, r, :d1] x B[:d2, r, e]`, times the scaling, to expert e,
whichever of d1 and d2 are inputs. `lora_A` is `[E r, d1]`, expert by expert, and `lora_B` is `[d2, r E]`, rank by rank.
Gate and up share a parameter, so their ranks add up, and the factor on the output side is zero outside of each
projection's own rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig
from peft import get_peft_model as peft_get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from ktft.adapters.files import LazyTensor
from ktft.adapters.lora import KINDS
from ktft.adapters.saved import FROZEN, PREFIX, Place, SavedAdapter, int_if_whole
from ktft.model.meta import meta_model

PARAMETERS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The names of transformers' stacked parameters, and the projections that each one holds."""


@dataclass(frozen=True)
class Stacked:
    """One stacked parameter `[num_experts, d1, d2]` of one layer, and those of its projections that have LoRA."""

    adapter: SavedAdapter
    experts: str
    parameter: str
    shape: tuple[int, int, int]
    transposed: bool

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return f"{self.experts}.{self.parameter}"

    @property
    def projections(self) -> list[str]:
        return [each for each in self.adapter.expert_projections(self.experts) if each in PARAMETERS[self.parameter]]

    def place(self, expert: int, projection: str) -> Place:
        return self.adapter.expert_place(self.experts, expert, projection)

    @property
    def r(self) -> int:
        """The sum of the projections' ranks."""
        return sum(self.place(0, each).r for each in self.projections)

    @property
    def scaling(self) -> float:
        """The first projection's scaling, which serves all. The B of each other projection is multiplied to match."""
        return self.place(0, self.projections[0]).scaling

    def rows(self, projection: str) -> slice:
        """The parameter's outputs that belong to this projection."""
        if self.parameter == "down_proj":
            return slice(None)
        number = PARAMETERS[self.parameter].index(projection)
        if self.adapter.experts[self.experts].family.layouts[0].interleaved:
            return slice(number, None, 2)
        half = self.shape[2 if self.transposed else 1] // 2
        return slice(number * half, (number + 1) * half)

    def lazy(self, kind: str) -> LazyTensor:
        """PEFT's `lora_A` or `lora_B`, computed only when it is written."""
        experts, d1, d2 = self.shape
        shape = (experts * self.r, d1) if kind == "lora_A" else (d2, self.r * experts)
        dtype = self.adapter.dtype(self.place(0, self.projections[0]))
        return LazyTensor(dtype, shape, lambda: self._make(kind, dtype))

    def _make(self, kind: str, dtype: torch.dtype) -> Tensor:
        experts, d1, d2 = self.shape
        # unless the parameter is transposed, d2 is the input size and lora_A holds the B that is on disk
        holds_b = (kind == "lora_A") != self.transposed
        made = torch.zeros(experts, self.r, d1 if kind == "lora_A" else d2)
        for expert in range(experts):
            at = 0
            for projection in self.projections:
                place = self.place(expert, projection)
                ranks, at = slice(at, at + place.r), at + place.r
                if holds_b:
                    b = self.adapter.read(place.tensor("lora_B")).float() * (place.scaling / self.scaling)
                    made[expert, ranks, self.rows(projection)] = b.T
                else:
                    made[expert, ranks] = self.adapter.read(place.tensor("lora_A")).float()
        arranged = made.flatten(0, 1) if kind == "lora_A" else made.permute(2, 1, 0).flatten(1)
        return arranged.to(dtype).contiguous()


def arrange(adapter: SavedAdapter) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """The configuration and the tensors of the adapter in PEFT's layout for stacked experts.

    Raises ValueError if transformers' model has no stacked parameters where the adapter has LoRA.
    """
    model = meta_model(adapter.base)
    stacked = {each.name: each for each in _stacked(adapter, model)}
    config = _configure(adapter, stacked)
    copied = [PREFIX + name for name in adapter.whole]
    copied += [place.tensor(kind) for place in adapter.linears for kind in KINDS]
    tensors = {name: adapter.lazy(name) for name in copied}
    # PEFT decides which of a module's two parameters wraps the other, and that decides the names of their tensors
    wrapped = peft_get_peft_model(model, LoraConfig(**config), low_cpu_mem_usage=True)
    for name, module in wrapped.named_modules():
        if isinstance(module, ParamWrapper):
            experts = name.removeprefix(PREFIX).replace(".base_layer", "")  # PEFT may have wrapped them twice
            part = stacked.pop(f"{experts}.{module.parameter_name}")
            tensors |= {f"{name}.{kind}.weight": part.lazy(kind) for kind in KINDS}
    assert not stacked, f"PEFT found no parameter {next(iter(stacked))}"
    return config, tensors


def _stacked(adapter: SavedAdapter, model: Any) -> Iterator[Stacked]:
    for name in adapter.experts:
        module = model.get_submodule(name)
        for parameter, projections in PARAMETERS.items():
            if not set(projections) & set(adapter.expert_projections(name)):
                continue
            weight = getattr(module, parameter, None)
            if weight is None or weight.dim() != 3:
                raise ValueError(
                    f"{name}.{parameter} is no stacked parameter in {type(module).__name__}; load as it is"
                )
            yield Stacked(adapter, name, parameter, tuple(weight.shape), getattr(module, "is_transposed", False))


def _configure(adapter: SavedAdapter, stacked: dict[str, Stacked]) -> dict[str, Any]:
    config = adapter.config.to_dict()
    linears = adapter.linears
    ranks = {place.name: place.r for place in linears} | {name: part.r for name, part in stacked.items()}
    scalings = {place.name: place.scaling for place in linears} | {n: part.scaling for n, part in stacked.items()}
    root = adapter.config.use_rslora
    alphas = {name: scalings[name] * (math.sqrt(r) if root else r) for name, r in ranks.items()}
    r, alpha = adapter.config.r, adapter.config.lora_alpha
    return config | {
        "target_modules": [place.name for place in linears],
        "target_parameters": list(stacked) or None,
        # PEFT sorts patterns when it saves and takes the first that matches; only full names match one module each
        "rank_pattern": {name: each for name, each in ranks.items() if each != r},
        "alpha_pattern": {name: int_if_whole(each) for name, each in alphas.items() if not math.isclose(each, alpha)},
        **FROZEN,
    }
