"""Where the tensors of a saved adapter go in an engine's model: each has one place, or the adapter is refused.

Engines fuse linear layers, and call some by other names than transformers. An engine describes its model by a `Target`:
its names, and which layers do not apply LoRA.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from ktft.adapters.below import require_merged
from ktft.adapters.files import CONFIG
from ktft.adapters.lora import KINDS
from ktft.adapters.saved import PREFIX, Place, SavedAdapter, require_untouched_base
from ktft.checkpoint.cache import sha256
from ktft.checkpoint.families import GROUPS, group_of
from ktft.checkpoint.files import to_json
from ktft.checkpoint.identity import identify
from ktft.lora import RANK_BLOCK, ExpertLora
from ktft.model.experts import experts_family, layer_number
from ktft.system import available_memory, readable

MERGE = "merge it into the base model (ktft merge BASE {adapter} OUT) and serve OUT"


@dataclass(frozen=True)
class Slot:
    """A linear layer that applies LoRA: the size of its input, and of each fused part of its output."""

    input_size: int
    parts: tuple[int, ...]

    @property
    def bounds(self) -> tuple[int, ...]:
        """The rows of the output between which the parts lie."""
        return (0, *accumulate(self.parts))


@dataclass(frozen=True)
class Target:
    """An engine's model, as far as adapters are concerned.

    Attributes:
        slots: the linear layers that apply LoRA, by the engine's names.
        refused: the linear layers that do not, and why.
        packed: last part of a fused layer's name -> last parts of the names of the layers in it, in the order of its
            output.
        rename: from transformers' name of a module to the engine's, without fusing layers.
        max_rank: the largest rank that a slot takes.
        experts: layer number -> (number of experts, hidden size, intermediate size).
    """

    slots: Mapping[str, Slot]
    refused: Mapping[str, str]
    packed: Mapping[str, Sequence[str]]
    rename: Callable[[str], str]
    max_rank: int
    experts: Mapping[int, tuple[int, int, int]]


@dataclass(frozen=True)
class SliceLora:
    """LoRA on rows `start` to `stop` of a linear layer's output: fp32, in CPU memory; `b` includes the scaling."""

    start: int
    stop: int
    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class _Seat:
    """The rows of a slot's output that the LoRA of a place goes to."""

    slot: str
    start: int
    stop: int
    place: Place


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter's tensors in memory: the experts' by layer number, the linear layers' by slot."""

    experts: dict[int, ExpertLora]
    linears: dict[str, list[SliceLora]]


class ServedAdapter:
    """An adapter directory, all of whose tensors have a place in an engine's model.

    Args:
        directory: an adapter as ktft's training saves it.
        checkpoint: the base model that is served.
        target: the engine's model.

    Raises:
        ValueError: `SavedAdapter` refuses the adapter; it does not belong on this base model; or the engine would not
            apply one of its tensors. The message names the tensor and the cure.
    """

    def __init__(self, directory: Path, checkpoint: Path, target: Target) -> None:
        self.saved = SavedAdapter(directory, AutoConfig.from_pretrained(checkpoint))
        self.target = target
        self._cure = MERGE.format(adapter=self.saved.directory)
        require_untouched_base(self.saved)
        if self.saved.below:
            command = f"ktft serve {{base}} --adapter {directory}"
            require_merged(self.saved.directory, self.saved.below, checkpoint, command)
        for name in self.saved.whole:
            raise ValueError(
                f"{self.saved.file.files[0]} holds {PREFIX}{name}, trained whole (modules_to_save, additional_target), "
                f"which cannot be served beside the base model's own; {self._cure}"
            )
        if not self.saved.places:
            raise ValueError(f"{self.saved.directory} holds no LoRA, so there is nothing to serve")
        self._numbers = {name: self._number(name) for name in self.saved.experts}
        self._seats = [self._seat(place) for place in self.saved.linears]
        self._check_each_once()

    # --- places -------------------------------------------------------------------------------------------------------

    def _number(self, experts: str) -> int:
        module, number = self.saved.experts[experts], layer_number(experts)
        sizes = (module.num_experts, module.hidden_size, module.intermediate_size)
        if (served := self.target.experts.get(number)) != sizes:
            raise ValueError(
                f"{self.saved.directory} has LoRA on {experts} with (experts, hidden size, intermediate size) {sizes}, "
                f"the server's layer {number} has {served or 'no routed experts'}"
            )
        return number

    def _seat(self, place: Place) -> _Seat:
        """Where LoRA on a linear layer goes: to the slot of its name, or to its rows of a fused layer's slot."""
        name, tensor = self._slot_of(place), place.tensor(KINDS[0])
        slot = self.target.slots[name]
        start, rows = self._rows(place, name)
        stop = start + place.fan_out
        fits = place.fan_in == slot.input_size and rows == slot.bounds[-1] and {start, stop} <= set(slot.bounds)
        if not fits:
            raise ValueError(
                f"{tensor} is for a layer of {place.fan_in} inputs and rows {start} to {stop} of {rows}; the server's "
                f"{name} has {slot.input_size} inputs and parts of {slot.parts}"
            )
        if place.r > self.target.max_rank:
            raise ValueError(
                f"{tensor} has rank {place.r}, the server takes {self.target.max_rank} at most; start it with "
                f"--max-lora-rank {place.r}"
            )
        return _Seat(name, start, stop, place)

    def _slot_of(self, place: Place) -> str:
        name = self.target.rename(place.name)
        parent = name.rpartition(".")[0]
        fused = (f"{parent}.{packed}" for packed, leaves in self.target.packed.items() if place.leaf in leaves)
        names = [name, *fused]
        if found := next((each for each in names if each in self.target.slots), None):
            return found
        reasons = (self.target.refused[each] for each in names if each in self.target.refused)
        raise ValueError(
            f"the server would not apply {place.tensor(KINDS[0])}: "
            f"{next(reasons, f'its model has no linear layer {name}')}; {self._cure}, or train without {place.leaf} in "
            "lora_target"
        )

    def _rows(self, place: Place, slot: str) -> tuple[int, int]:
        """The first row of a linear layer's output within its slot's, and the rows of all that is fused there."""
        if slot == self.target.rename(place.name):
            return 0, place.fan_out
        parent, leaves = place.name.rpartition(".")[0], list(self.target.packed[slot.rpartition(".")[2]])
        sizes = [self.saved.linear_place(f"{parent}.{leaf}").fan_out for leaf in leaves]
        return sum(sizes[: leaves.index(place.leaf)]), sum(sizes)

    def _check_each_once(self) -> None:
        """Check that every tensor of the file goes to one place, and that no place gets two."""
        taken = Counter(row for seat in self._seats for row in ((seat.slot, seat.start), (seat.slot, -seat.stop)))
        if doubled := [key for key, count in taken.items() if count > 1]:
            names = [seat.place.name for seat in self._seats if seat.slot == doubled[0][0]]
            raise ValueError(f"{' and '.join(names)} of {self.saved.directory} overlap in the server's {doubled[0][0]}")
        seated = {seat.place.tensor(kind) for seat in self._seats for kind in KINDS}
        seated |= {place.tensor(kind) for place in self.saved.places.values() if place.experts for kind in KINDS}
        if left := sorted(self.saved.file.tensors.keys() ^ seated):
            raise ValueError(f"{self.saved.file.files[0]}: {left[0]} has no place in the server's model; {self._cure}")

    # --- tensors ------------------------------------------------------------------------------------------------------

    def read(self) -> LoadedAdapter:
        """Read and check every tensor.

        Raises:
            ValueError: a tensor is damaged, or holds NaN or Inf; or there is too little memory beside what is served
                now.
        """
        need = 0
        for place in self.saved.places.values():
            rank = -(-place.r // RANK_BLOCK) * RANK_BLOCK if place.experts else place.r
            need += 4 * rank * (place.fan_in + place.fan_out)
        if need > (free := available_memory()):
            raise ValueError(
                f"{self.saved.directory} takes {readable(need)} of memory, {readable(free)} are free beside what "
                "is served, which stays until this one is whole; unload an adapter first"
            )
        experts = {number: lora for name, number in self._numbers.items() if (lora := self.saved.lora(name))}
        linears: dict[str, list[SliceLora]] = {}
        for seat in self._seats:
            a, b = (self.saved.read(seat.place.tensor(kind)).float() for kind in KINDS)
            linears.setdefault(seat.slot, []).append(SliceLora(seat.start, seat.stop, a, b * seat.place.scaling))
        return LoadedAdapter(experts, linears)

    def describe(
        self, linears: Mapping[str, tuple[Tensor, Tensor]], experts: Mapping[int, ExpertLora]
    ) -> dict[str, Any]:
        """What the adapter is and what of it is put into the model, as values of JSON.

        `identity` is the SHA-256 of its settings, of samples of its file, and of the file's header, which has the
        checksums of all tensors. `tensors` counts the tensors of its file by group of the model's parameters. `applied`
        counts the modules with LoRA, and those whose B is not zero as the model gets it. A module is a linear layer of
        transformers' model, or one projection of a layer's routed experts.

        Args:
            linears: A and B of each slot; B has the rows of the slot's output.
            experts: the LoRA of each layer's routed experts.
        """
        family, directory = experts_family(self.saved.model), self.saved.directory
        effects: dict[str, list[bool]] = {}
        for seat in self._seats:
            applied = bool(torch.any(linears[seat.slot][1][seat.start : seat.stop]))
            effects.setdefault(group_of(seat.place.name, family), []).append(applied)
        if pairs := [pair for lora in experts.values() for pair in lora.pairs.values()]:
            effects[GROUPS[2]] = [bool(torch.any(pair.b)) for pair in pairs]
        sealed = identify(self.saved.file.files) | {CONFIG: sha256(directory / CONFIG)}
        return {
            "name": directory.resolve().name,
            "path": str(directory),
            "identity": hashlib.sha256(to_json(sealed)).hexdigest(),
            "ranks": sorted({place.r for place in self.saved.places.values()}),
            "tensors": dict(Counter(group_of(name, family) for name in self.saved.file.tensors)),
            "applied": {group: {"modules": len(each), "nonzero": sum(each)} for group, each in effects.items()},
        }
