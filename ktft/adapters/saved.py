"""A saved adapter, checked against its base model's config; its tensors are then read one at a time."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import PreTrainedConfig

from ktft.adapters import files
from ktft.adapters.below import BELOW, Below
from ktft.adapters.deltas import Delta, LoraDelta, Replacement
from ktft.adapters.lora import KINDS, UNSUPPORTED
from ktft.adapters.reach import rank_of, reach_of
from ktft.adapters.shared import form_of, is_shared
from ktft.checkpoint.files import CRC32
from ktft.checkpoint.reader import DTYPES
from ktft.config import PER_EXPERT, PROJECTIONS, SHARED_OUTER
from ktft.lora import ExpertLora, LoraPair
from ktft.model.experts import KtftExperts
from ktft.model.shape import shape_of

PREFIX = "base_model.model."
"""The prefix that PEFT puts before a module's name in an adapter file."""

REFUSED = UNSUPPORTED | {
    "bias": "biases trained beside LoRA",
    "trainable_token_indices": "trainable tokens",
    "alora_invocation_tokens": "activated LoRA",
}
"""PEFT options that ktft cannot merge, export or verify, with their common names."""
INITS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base weights as they are."""
FROZEN = {
    "layers_to_transform": None,
    "layers_pattern": None,
    "exclude_modules": None,
    "lora_dropout": 0.0,  # PEFT has no dropout on parameters
    "inference_mode": True,
}
"""Fields of an exported configuration, whose targets are full names and which nobody trains further."""


def int_if_whole(value: float) -> float | int:
    """A whole number as an int, for a configuration."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-12) else value


@dataclass(frozen=True)
class Place:
    """A linear map that has LoRA or could have it: its name in the model, its LoRA rank and scaling, and its sizes.

    For a projection of a routed expert, `experts` is the name of the module that holds the layer's routed experts, and
    `form` tells which of its matrices it shares with the layer's other experts, one of `EXPERT_LORA`.
    """

    name: str
    r: int
    scaling: float
    fan_in: int
    fan_out: int
    experts: str | None = None
    form: str = PER_EXPERT

    @property
    def leaf(self) -> str:
        """The last component of the name."""
        return self.name.rpartition(".")[2]

    def tensor(self, kind: str) -> str:
        """The name on disk of the tensor that has this place's `lora_A` or `lora_B`."""
        return f"{PREFIX}{self.experts}.{self.leaf}.{kind}.weight" if self.shares(kind) else self.standard(kind)

    def standard(self, kind: str) -> str:
        """The name of this place's `lora_A` or `lora_B` in an adapter that shares no matrix."""
        return f"{PREFIX}{self.name}.{kind}.weight"

    def shape(self, kind: str) -> tuple[int, int]:
        """The shape of this place's `lora_A` or `lora_B`."""
        return (self.r, self.fan_in) if kind == "lora_A" else (self.fan_out, self.r)

    def stored(self, kind: str) -> tuple[int, ...]:
        """The shape on disk of the tensor that has this place's `lora_A` or `lora_B`."""
        return (1, *self.shape(kind)) if self.shares(kind) else self.shape(kind)

    def shares(self, kind: str) -> bool:
        """Whether this place's `lora_A` or `lora_B` is that of all experts of the layer."""
        return self.experts is not None and is_shared(self.form, self.leaf, kind)


class SavedAdapter:
    """An adapter directory, checked against its base model's config.

    Attributes:
        directory: what `save_pretrained` wrote, or a local copy of a repository on the Hugging Face Hub.
        base, model: the base model's config, and the model on the meta device with empty `KtftExperts`.
        below: the adapters that this one was trained on top of; see `ktft.adapters.below`.
        places: every module with LoRA, by name.
        experts: the modules of routed experts with LoRA, by name.
        form: of the LoRA on them, one of `EXPERT_LORA`.
        whole: names of the model's tensors that the adapter holds whole (`modules_to_save`).

    Raises:
        ValueError: a tensor is missing, unexpected or has the wrong shape; the file is damaged; the adapter belongs to
            another model, uses an option in `REFUSED`, or has LoRA on modules other than linear ones and experts.
    """

    def __init__(self, directory: str | os.PathLike[str], base: PreTrainedConfig) -> None:
        self.directory = files.local_directory(directory)
        self.config: LoraConfig = files.read_config(self.directory)
        for option, what in REFUSED.items():
            if (getattr(self.config, option, None) or "none") != "none":
                raise ValueError(
                    f"{self.directory / files.CONFIG}: {what} ({option}) cannot be merged, exported or verified by ktft"
                )
        metadata = files.read_own_metadata(self.directory)
        files.check_model_type(self.directory, metadata, base.model_type)
        self._checksums = metadata.get(CRC32, {})
        self.below: Below = metadata.get(files.RECORD, {}).get(BELOW, [])
        self.base, (_, self.model) = base, shape_of(base)
        self.file = files.open_tensors(self.directory)
        self.form = form_of(self.file.tensors)
        reach = reach_of(self.model, self.config)
        self.experts = {name: self._experts(name) for name in reach.ranks}
        places = [self.linear_place(name) for name in sorted(reach.modules - reach.ranks.keys())]
        for name, ranks in reach.ranks.items():
            for expert in range(self.experts[name].num_experts):
                places += [self.expert_place(name, expert, projection) for projection in ranks]
        self.places = {place.name: place for place in places}
        whole = dict(_tensors_in(self.model, self.config.modules_to_save or ()))
        self.whole = tuple(whole)
        # One expert after another asks for the same one
        self._shared = functools.lru_cache(maxsize=len(KINDS))(self._read_shared)
        files.check_fit(
            self.file,
            {place.tensor(kind): torch.empty(place.stored(kind), device="meta") for place in places for kind in KINDS}
            | {PREFIX + name: tensor for name, tensor in whole.items()},
        )

    # --- places -------------------------------------------------------------------------------------------------------

    def linear_place(self, name: str) -> Place:
        """The place of a linear module of the base model, whether or not it has LoRA."""
        module = self.model.get_submodule(name)
        if not isinstance(module, nn.Linear):
            raise ValueError(
                f"{self.directory} has LoRA on {name}, which is {type(module).__name__}; ktft merges, exports and "
                "verifies LoRA on linear modules and experts only"
            )
        return self._place(name, module.in_features, module.out_features)

    def expert_place(self, experts: str, expert: int, projection: str) -> Place:
        """The place of one projection of one routed expert, whether or not it has LoRA."""
        module = self._experts(experts)
        sizes = module.hidden_size, module.intermediate_size
        fan_in, fan_out = sizes[::-1] if projection == "down_proj" else sizes
        return self._place(f"{experts}.{expert}.{projection}", fan_in, fan_out, experts)

    def _place(self, name: str, fan_in: int, fan_out: int, experts: str | None = None) -> Place:
        rank = rank_of(self.config, name)
        return Place(name, rank.r, rank.scaling(self.config.use_rslora), fan_in, fan_out, experts, self.form)

    def _experts(self, name: str) -> KtftExperts:
        module = self.model.get_submodule(name)
        assert isinstance(module, KtftExperts)
        return module

    @property
    def linears(self) -> list[Place]:
        """The places outside the routed experts."""
        return [place for place in self.places.values() if place.experts is None]

    def expert_projections(self, experts: str) -> list[str]:
        """The projections of these experts that have LoRA, in the order of `PROJECTIONS`."""
        return [each for each in PROJECTIONS if f"{experts}.0.{each}" in self.places]

    # --- tensors ------------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(entry.nbytes for entry in self.file.tensors.values())

    def dtype(self, place: Place) -> torch.dtype:
        """The dtype on disk of a place's `lora_A` and `lora_B`."""
        return DTYPES[self.file.tensors[place.tensor(KINDS[0])].dtype]

    def read(self, name: str) -> Tensor:
        """Read a tensor by its name on disk. Raises ValueError if it is damaged or holds NaN or Inf.

        A matrix that experts share is given as each of them has it, without the dimension that the file has for them.
        """
        if form_of([name]) == SHARED_OUTER:
            return self._shared(name)
        return files.read_checked(self.file, name, self._checksums)

    def _read_shared(self, name: str) -> Tensor:
        return files.read_checked(self.file, name, self._checksums)[0]

    def check_values(self) -> Iterator[int]:
        """Read and check every tensor once, as `read` does. Yields each tensor's size in bytes."""
        for name, entry in self.file.tensors.items():
            self.read(name)
            yield entry.nbytes

    def lazy(self, name: str) -> files.LazyTensor:
        """A tensor, by its name on disk, to be written unchanged; it is read only when it is written."""
        entry = self.file.tensors[name]
        return files.LazyTensor(DTYPES[entry.dtype], entry.shape, partial(self.read, name))

    def delta(self, name: str) -> Delta:
        """The fp32 delta for the module `name` in `places`, or the replacement for the tensor `name` in `whole`."""
        if name not in self.places:
            return Replacement(self.read(PREFIX + name).float())
        place = self.places[name]
        a, b = (self.read(place.tensor(kind)).float() for kind in KINDS)
        return LoraDelta(a, b, place.scaling)

    def stack(self, places: Sequence[Place], kind: str) -> Tensor:
        """Stack `lora_A` or `lora_B` of places that have the same shape into `[len(places), ...]`, fp32."""
        stacked = torch.empty(len(places), *places[0].shape(kind))
        for place, out in zip(places, stacked, strict=True):
            out.copy_(self.read(place.tensor(kind)))
        return stacked

    def lora(self, experts: str) -> ExpertLora | None:
        """The fp32 LoRA on the routed experts in the module `experts`, or None if they have none."""
        pairs = {}
        for projection in self.expert_projections(experts):
            count = self.experts[experts].num_experts
            places = [self.places[f"{experts}.{expert}.{projection}"] for expert in range(count)]
            a, b = (self.stack(places, kind) for kind in KINDS)
            pairs[projection] = LoraPair(a, b, places[0].scaling)
        return ExpertLora(pairs) if pairs else None


def require_untouched_base(adapter: SavedAdapter) -> None:
    """Raise ValueError if an adapter's initialization subtracted something from the base model's weights."""
    if (init := adapter.config.init_lora_weights) not in INITS:
        raise ValueError(
            f"{adapter.directory / files.CONFIG}: init_lora_weights={init!r} changed the base weights before training, "
            "so the adapter does not belong on BASE; save it with PEFT's path_initial_model_for_weight_conversion first"
        )


def _tensors_in(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the modules that `modules_to_save` matches; like PEFT, it matches the end of a module's name."""
    for path, module in model.named_modules():
        if path and path.endswith(tuple(names)):
            for tensor, value in module.state_dict().items():
                yield f"{path}.{tensor}", value
