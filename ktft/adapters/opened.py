"""A saved adapter beside the shape of its base model: every tensor accounted for, read one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from ktft.adapters.files import (
    CONFIG,
    LazyTensor,
    check_fit,
    check_model_type,
    local_directory,
    open_tensors,
    read_checked,
    read_config,
    read_own_metadata,
)
from ktft.adapters.lora import KINDS, UNSUPPORTED
from ktft.adapters.peft import rank_of, reach_of
from ktft.checkpoint.files import CRC32
from ktft.checkpoint.reader import DTYPES
from ktft.config import PROJECTIONS
from ktft.model.experts import KtftExperts
from ktft.model.shape import shape_of

PREFIX = "base_model.model."
"""What PEFT puts before a module's name in an adapter file."""


@dataclass(frozen=True)
class Place:
    """A linear map that LoRA is on, or could be: its name in the model, LoRA's rank and scaling, its sizes.

    `experts` is the name of the module that holds the layer's routed experts, for a projection of one of them.
    """

    name: str
    r: int
    scaling: float
    fan_in: int
    fan_out: int
    experts: str | None = None

    @property
    def leaf(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]

    def tensor(self, kind: str) -> str:
        """The name on disk of its `lora_A` or `lora_B`."""
        return f"{PREFIX}{self.name}.{kind}.weight"


class OpenedAdapter:
    """An adapter directory, compared with its base model's config.

    Args:
        directory: as `save_pretrained` wrote it.
        base: the base model's directory, or its config.json. None: what the adapter's configuration names.

    Attributes:
        config: the adapter's.
        base: the base model's config.
        places: every module with LoRA, by name.
        experts: the modules of routed experts with LoRA, by name.
        whole: names of tensors that are no LoRA pair, such as modules that were trained whole.

    Raises:
        ValueError: no base model; the adapter is damaged, of another model, or has what export does not know.
    """

    def __init__(self, directory: Path, base: Path | None = None) -> None:
        self.directory = local_directory(directory)
        self.config: LoraConfig = read_config(self.directory)
        self._refuse_unknown()
        self.base = self._read_base(base)
        metadata = read_own_metadata(self.directory)
        check_model_type(self.directory, metadata, self.base.model_type)
        self._checksums = metadata.get(CRC32, {})
        _, self.model = shape_of(self.base)
        reach = reach_of(self.model, self.config)
        self.experts: dict[str, KtftExperts] = {}
        self.places: dict[str, Place] = {}
        for name in sorted(reach.modules - reach.ranks.keys()):
            self.places[name] = self.linear_place(name)
        for name, ranks in reach.ranks.items():
            module = self.model.get_submodule(name)
            assert isinstance(module, KtftExperts)
            self.experts[name] = module
            for expert in range(module.num_experts):
                for projection in ranks:
                    place = self.expert_place(name, expert, projection)
                    self.places[place.name] = place
        self.file = open_tensors(self.directory)
        expected = {
            place.tensor(kind): torch.empty(shape, device="meta")
            for place in self.places.values()
            for kind, shape in zip(KINDS, ((place.r, place.fan_in), (place.fan_out, place.r)), strict=True)
        }
        self.whole = tuple(name for name in self.file.tensors if ".lora_" not in name)
        weights = self.model.state_dict()
        for name in self.whole:
            weight = weights.get(name.removeprefix(PREFIX))
            if weight is not None:
                expected[name] = weight
        check_fit(self.file, expected)

    def _refuse_unknown(self) -> None:
        options = {**UNSUPPORTED, "layer_replication": "layer replication", "trainable_token_indices": "new tokens"}
        for option, what in options.items():
            if getattr(self.config, option, None):
                raise ValueError(f"{self.directory}: export does not know {what} ({option}); use ktft merge")
        if self.config.bias != "none":
            raise ValueError(f"{self.directory}: export does not know trained biases (bias: {self.config.bias})")

    def _read_base(self, base: Path | None) -> PreTrainedConfig:
        named = base or self.config.base_model_name_or_path
        cure = "name its directory, or its config.json, with --base"
        if not named:
            raise ValueError(f"{self.directory / CONFIG} names no base model; {cure}")
        try:
            found: PreTrainedConfig = AutoConfig.from_pretrained(str(named), trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            first = str(error).splitlines()[0]
            raise ValueError(f"the base model {named} has no config that can be read: {first}; {cure}") from None
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.nbytes for entry in self.file.tensors.values())

    def linear_place(self, name: str) -> Place:
        """A linear module of the base model, whether it has LoRA or not."""
        module = self.model.get_submodule(name)
        if not isinstance(module, nn.Linear):
            raise ValueError(f"{name} is {type(module).__name__}; export knows LoRA on linear modules and experts only")
        rank = rank_of(self.config, name)
        return Place(name, rank.r, rank.scaling(self.config.use_rslora), module.in_features, module.out_features)

    def expert_place(self, experts: str, expert: int, projection: str) -> Place:
        """One projection of one routed expert, whether it has LoRA or not."""
        module = self.model.get_submodule(experts)
        assert isinstance(module, KtftExperts)
        sizes = module.hidden_size, module.intermediate_size
        fan_in, fan_out = sizes[::-1] if projection == "down_proj" else sizes
        name = f"{experts}.{expert}.{projection}"
        rank = rank_of(self.config, name)
        return Place(name, rank.r, rank.scaling(self.config.use_rslora), fan_in, fan_out, experts)

    def expert_projections(self, experts: str) -> list[str]:
        """The projections of these experts that have LoRA, in the order of `PROJECTIONS`."""
        return [each for each in PROJECTIONS if f"{experts}.0.{each}" in self.places]

    def dtype(self, place: Place) -> torch.dtype:
        """Of a pair on disk."""
        return DTYPES[self.file.tensors[place.tensor(KINDS[0])].dtype]

    def read(self, name: str) -> Tensor:
        """A tensor by its name on disk. Raises ValueError if it is damaged, NaN or Inf."""
        return read_checked(self.file, name, self._checksums)

    def copied(self) -> Iterator[tuple[str, LazyTensor]]:
        """The tensors of `whole`, to be written as they are."""
        for name in self.whole:
            entry = self.file.tensors[name]
            yield name, LazyTensor(DTYPES[entry.dtype], entry.shape, partial(self.read, name))
