"""The optimizer's state of LoRA on experts that ranks share: each rank saves its own, any number of ranks reads it.

Beside `optimizer.pt`, which rank 0 writes for all else, a checkpoint then has one file by rank. Tensors in it stack a
rank's experts along their first dimension; numbers tell which ones. A rank that resumes takes the rows of the experts
that it holds now, wherever they are: in these files, or in the `optimizer.pt` of a run in one process.

LoRA that tensor parallel ranks hold in pieces is whole in `optimizer.pt`, and each rank takes its piece from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from ktft.adapters.peft import expert_layers
from ktft.adapters.tensor_parallel import shards_of
from ktft.held import HeldExperts
from ktft.ranks.group import Ranks, ranks
from ktft.ranks.sharded import is_sharded, shard_like, whole
from ktft.ranks.tensor_parallel import Shard

State = dict[str, Any]
"""Name of a value of an optimizer's state -> the value, for one parameter."""


def shard_name(rank: int, ranks: int) -> str:
    """The name of a rank's file in a checkpoint."""
    return f"optimizer-experts-{rank:05d}-of-{ranks:05d}.pt"


_NAME = re.compile(r"optimizer-experts-(\d{5})-of-(\d{5})\.pt")


def held_rows(model: nn.Module) -> dict[str, HeldExperts]:
    """Name of each parameter that stacks experts -> the experts that its rows are."""
    held = {
        id(tensor): layer.experts.held
        for layer in expert_layers(model).values()
        for adapter in layer.lora_A
        for _, _, tensor in layer.stacks(adapter)
    }
    return {name: held[id(parameter)] for name, parameter in model.named_parameters() if id(parameter) in held}


def names_of(model: nn.Module, optimizer: Any) -> list[str]:
    """The names of an optimizer's parameters, in the order in which its state dict numbers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(p), "not in the model") for group in optimizer.param_groups for p in group["params"]]


def without_experts(state_dict: Mapping[str, Any], names: list[str], experts: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict without the state of these parameters."""
    kept = {at: state for at, state in state_dict["state"].items() if names[at] not in experts}
    return {**state_dict, "state": kept}


def with_whole_states(state_dict: Mapping[str, Any], model: nn.Module, names: list[str]) -> dict[str, Any]:
    """An optimizer's state dict with whole tensors where tensor parallel ranks hold pieces. All ranks must call it."""
    return {**state_dict, "state": _changed(state_dict["state"], model, names, lambda shard, own: shard.gather(own))}


def _with_own_pieces(state_dict: Mapping[str, Any], model: nn.Module, names: list[str]) -> dict[str, Any]:
    """The state dict of one process with only this rank's pieces of what tensor parallel ranks divide."""
    own = _changed(state_dict["state"], model, names, lambda shard, whole: shard.of_this_rank(whole).clone())
    return {**state_dict, "state": own}


def _changed(
    states: Mapping[int, State], model: nn.Module, names: list[str], change: Callable[[Shard, Tensor], Tensor]
) -> dict[int, State]:
    """States by position, changed where a parameter is held in pieces and the state has a value for each element.

    Raises:
        ValueError: a tensor of the state has another shape than the parameter.
    """
    shards, changed = shards_of(model), dict(states)
    shapes = {name: (list(p.shape), shards[name].shape(p)) for name, p in model.named_parameters() if name in shards}
    for at, name in enumerate(names):
        if name not in shards or at not in changed:
            continue
        changed[at] = dict(changed[at])
        for key, value in changed[at].items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                continue
            if list(value.shape) not in shapes[name]:
                raise ValueError(
                    f"the optimizer's {key} of {name} has no value for each element, so that tensor parallel ranks "
                    "cannot hold pieces of it; set optim: adamw_torch"
                )
            changed[at][key] = change(shards[name], value)
    return changed


def whole_state(model: nn.Module, optimizer: Any, together: Ranks) -> dict[str, Any]:
    """An optimizer's state dict, which rank 0 writes: without experts, of which every rank saves its own.

    What FSDP2 divides is whole on rank 0, in CPU memory. All ranks must call it.
    """
    experts = held_rows(model)
    names = names_of(model, optimizer)
    found = without_experts(with_whole_states(optimizer.state_dict(), model, names), names, experts)
    state = {at: {key: _undivided(each, together) for key, each in own.items()} for at, own in found["state"].items()}
    return {**found, "state": state}


def _undivided(value: Any, together: Ranks) -> Any:
    if not is_sharded(value):
        return value
    found = whole(value, together)
    return found.cpu() if together.first else None


def save_shard(folder: Path, model: nn.Module, optimizer: Any, together: Ranks) -> None:
    """Write this rank's file."""
    held, names = held_rows(model), names_of(model, optimizer)
    states = optimizer.state_dict()["state"]
    content = {
        names[at]: {"numbers": list(held[names[at]].numbers), "state": state}
        for at, state in states.items()
        if names[at] in held
    }
    torch.save(content, folder / shard_name(together.rank, together.size))


@dataclass
class _Source:
    """Some experts' state of one parameter, as it was saved."""

    numbers: list[int]
    state: State


def has_shards(path: Path) -> bool:
    """Whether several ranks wrote this checkpoint."""
    return any(_NAME.fullmatch(file.name) for file in path.iterdir())


def load_divided(path: Path, model: nn.Module, optimizer: Any, scheduler: Any) -> None:
    """Load a checkpoint's optimizer and scheduler, with the state of the experts that this process holds.

    Files are mapped into memory, so that only what is taken is read.

    Raises:
        ValueError: a file is missing, an expert's state is in none, or the optimizer's state cannot be divided.
    """
    found = torch.load(path / OPTIMIZER_NAME, map_location="cpu", mmap=True, weights_only=True)
    found = _with_experts(path, found, model, optimizer)
    found = _with_own_pieces(found, model, names_of(model, optimizer))
    optimizer.load_state_dict({**found, "state": _divided(found["state"], optimizer)})
    scheduler.load_state_dict(torch.load(path / SCHEDULER_NAME, map_location="cpu", weights_only=True))


def _divided(state: dict[int, State], optimizer: Any) -> dict[int, State]:
    """The state, divided as FSDP2 divides the parameters that it belongs to."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {at: {key: _like(each, parameters[at]) for key, each in own.items()} for at, own in state.items()}


def _like(value: Any, parameter: Tensor) -> Any:
    if isinstance(value, Tensor) and is_sharded(parameter) and value.shape == parameter.shape:
        return shard_like(value, parameter, ranks())
    return value


def _with_experts(path: Path, state_dict: dict[str, Any], model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The state dict of `optimizer.pt`, with the rows of the experts that this process holds."""
    held, names = held_rows(model), names_of(model, optimizer)
    shards = _read(path)
    state = dict(state_dict["state"])
    for at, name in enumerate(names):
        if name not in held:
            continue
        sources = [shard[name] for shard in shards if name in shard]
        if not shards and at in state:
            sources = [_Source(list(range(held[name].num_experts)), state[at])]
        if sources:
            state[at] = _rows(name, held[name], sources)
    return {**state_dict, "state": state}


def _read(path: Path) -> list[dict[str, _Source]]:
    found = sorted(file for file in path.iterdir() if _NAME.fullmatch(file.name))
    if found and found != [path / shard_name(rank, len(found)) for rank in range(len(found))]:
        raise ValueError(
            f"{path} has {', '.join(file.name for file in found)}: the files of some ranks are missing; copy the whole "
            "folder"
        )
    loaded = (torch.load(file, map_location="cpu", mmap=True, weights_only=True) for file in found)
    return [{name: _Source(each["numbers"], each["state"]) for name, each in shard.items()} for shard in loaded]


def _rows(name: str, held: HeldExperts, sources: list[_Source]) -> State:
    for source in sources:
        if source.numbers == list(held.numbers):
            return source.state
    where = {number: (source, row) for source in sources for row, number in enumerate(source.numbers)}
    if missing := [number for number in held.numbers if number not in where]:
        raise ValueError(f"the state of {name} for expert {missing[0]} is in none of the checkpoint's files")
    return {key: _value(name, key, held, sources, where) for key in sources[0].state}


def _value(
    name: str, key: str, held: HeldExperts, sources: list[_Source], where: Mapping[int, tuple[_Source, int]]
) -> Any:
    value = sources[0].state[key]
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.dim() < 2 or any(len(source.state[key]) != len(source.numbers) for source in sources):
        raise ValueError(
            f"the optimizer's {key} of {name} has no row for each expert, so that it cannot be divided among another "
            "number of processes; start as many as wrote it, or begin anew from its adapter"
        )
    rows = value.new_empty(held.count, *value.shape[1:])
    for place, number in enumerate(held.numbers):
        source, row = where[number]
        rows[place] = source.state[key][row]
    return rows
