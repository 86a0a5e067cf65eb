"""Adapters in PEFT's layout for stacked experts, which is how transformers 5 holds experts.

PEFT puts two factors on a stacked parameter `[E, d1, d2]`: `lora_A` is `[E r, inputs]`, expert by expert, and `lora_B`
is `[outputs, r E]`, rank by rank. PEFT 0.18 takes d1 for the inputs of every parameter, so that `lora_A` holds B where
d1 are the outputs. Gate and up share a parameter, so their ranks add up, and the factor on the output side is zero
outside of each projection's own rows.
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
from ktft.config import PROJECTIONS
from ktft.model.meta import meta_model
from ktft.versions import is_at_least, version_of

PARAMETERS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
"""The names of transformers' stacked parameters, and the projections that each one holds."""


LAYOUT_CHANGED = "0.19"
"""PEFT's first version that looks which side of a stacked parameter the inputs are. It also takes each target that is
named like a projection of experts for theirs, so the weights of such linear layers are targeted as parameters."""
SIDES_KNOWN = is_at_least(version_of("peft") or LAYOUT_CHANGED, LAYOUT_CHANGED)


def layout() -> str:
    """The versions of PEFT that read what this one makes."""
    return f"PEFT {LAYOUT_CHANGED} and later" if SIDES_KNOWN else f"PEFT before {LAYOUT_CHANGED}"


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
        if len(PARAMETERS[self.parameter]) == 1:
            return slice(None)
        number = PARAMETERS[self.parameter].index(projection)
        if self.adapter.experts[self.experts].family.layouts[0].interleaved:
            return slice(number, None, 2)
        half = self.shape[2 if self.transposed else 1] // 2
        return slice(number * half, (number + 1) * half)

    def lazy(self, kind: str) -> LazyTensor:
        """PEFT's `lora_A` or `lora_B`, computed only when it is written."""
        inner = self.shape[0] * self.r
        shape = (inner, self.side(kind)) if kind == "lora_A" else (self.side(kind), inner)
        dtype = self.adapter.dtype(self.place(0, self.projections[0]))
        return LazyTensor(dtype, shape, lambda: self._make(kind, dtype))

    @property
    def inputs_first(self) -> bool:
        """Whether PEFT takes d1 for the inputs, which it is if the parameter is transposed."""
        return self.transposed or not SIDES_KNOWN

    def side(self, kind: str) -> int:
        """The size of the parameter's side on which a factor is."""
        return self.shape[1 if (kind == "lora_A") == self.inputs_first else 2]

    def _make(self, kind: str, dtype: torch.dtype) -> Tensor:
        holds_b = (kind == "lora_B") == (self.transposed or SIDES_KNOWN)
        made = torch.zeros(self.shape[0], self.r, self.side(kind))
        for expert in range(self.shape[0]):
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
        if isinstance(module, ParamWrapper) and module.parameter_name in PARAMETERS:
            experts = name.removeprefix(PREFIX).replace(".base_layer", "")  # PEFT may have wrapped them twice
            part = stacked.pop(f"{experts}.{module.parameter_name}")
            tensors |= {f"{name}.{kind}.weight": part.lazy(kind) for kind in KINDS}
    assert not stacked, f"PEFT found no parameter {next(iter(stacked))}"
    return config, tensors


def _stacked(adapter: SavedAdapter, model: Any) -> Iterator[Stacked]:
    for name in adapter.experts:
        module = model.get_submodule(name)
        for parameter, projections in PARAMETERS.items():
            if parameter == ("up_proj" if "gate_proj" in adapter.experts[name].projections else "gate_up_proj"):
                continue
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
    taken = PROJECTIONS if SIDES_KNOWN else ()
    named = {place.name + ".weight" * (place.name.rpartition(".")[2] in taken): place for place in adapter.linears}
    ranks = {name: place.r for name, place in named.items()} | {name: part.r for name, part in stacked.items()}
    scalings = {name: place.scaling for name, place in named.items()} | {n: part.scaling for n, part in stacked.items()}
    root = adapter.config.use_rslora
    alphas = {name: scalings[name] * (math.sqrt(r) if root else r) for name, r in ranks.items()}
    r, alpha = adapter.config.r, adapter.config.lora_alpha
    return config | {
        "target_modules": [name for name, place in named.items() if name == place.name],
        "target_parameters": [name for name, place in named.items() if name != place.name] + list(stacked) or None,
        # PEFT sorts patterns when it saves and takes the first that matches; only full names match one module each
        "rank_pattern": {name: each for name, each in ranks.items() if each != r},
        "alpha_pattern": {name: int_if_whole(each) for name, each in alphas.items() if not math.isclose(each, alpha)},
        **FROZEN,
    }
