"""`ktft_checkpoint.json` proves that a training checkpoint is whole and belongs to a run. It is written last."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ktft.adapters.peft import expert_layers
from ktft.adapters.tensor_parallel import shards_of, whole_vector
from ktft.checkpoint.files import read_json, sync_tree, to_json, write_whole
from ktft.held import HeldExperts
from ktft.model.experts import find_experts
from ktft.model.tensor_parallel import tp_size_of
from ktft.ranks.group import Ranks, ranks
from ktft.ranks.sharded import is_sharded, local, whole
from ktft.ranks.tensor_parallel import Shard
from ktft.train.shards import held_rows, names_of

MANIFEST = "ktft_checkpoint.json"
VERSION = 1
LOADED = frozenset({".safetensors", ".bin", ".pt", ".pth"})
"""Suffixes of files that a Trainer may load from a checkpoint. Such a file is refused if the manifest lacks it."""
REQUIRED = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state*.pth")
"""Patterns of files that a checkpoint must have. Without one, a Trainer resumes with some state reset and reports no
error."""


def seal(directory: Path, facts: Mapping[str, Any]) -> int:
    """Make a written checkpoint durable, then list its files' sizes and SHA-256 beside `facts`. Returns their bytes."""
    sync_tree(directory)
    files = _describe_all(directory, _files(directory))
    write_whole(directory / MANIFEST, to_json({"version": VERSION, **facts, "files": files}))
    return sum(file["bytes"] for file in files.values())


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """A checkpoint's manifest; None if it has none, as checkpoints of plain transformers.

    Raises ValueError if it is not JSON, is of another version, or a field has an impossible value.
    """
    path = directory / MANIFEST
    if not path.is_file():
        return None
    manifest = read_json(path)
    if not isinstance(manifest, dict):
        raise ValueError(f"{path} is damaged: it is no mapping")
    if manifest.get("version") != VERSION:
        raise ValueError(f"{path} has version {manifest.get('version')}, this ktft reads version {VERSION}")
    for key, is_valid in _FIELDS.items():
        if not is_valid(manifest.get(key)):
            raise ValueError(f"{path} is damaged: {key} is {shorten(repr(manifest.get(key)), 200)}")
    return manifest


def _is_map(value: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, dict) and all(map(value, found.values()))


def _is_parameter(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and isinstance(found.get("name"), str)
        and isinstance(found.get("shape"), list)
        and isinstance(found.get("state"), dict)
    )


def _is_file(found: Any) -> bool:
    return isinstance(found, dict) and type(found.get("bytes")) is int and isinstance(found.get("sha256"), str)


_is_losses = _is_map(lambda value: type(value) in (int, float))
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": lambda found: type(found) is int,
    "run": _is_map(lambda value: isinstance(value, str)),
    "data": _is_map(lambda value: value is None or type(value) is int),
    "seed": lambda found: type(found) is int,
    "tokens_together": lambda found: found is None or type(found) is int,
    "parameters": lambda found: isinstance(found, list) and all(map(_is_parameter, found)),
    "losses": lambda found: _is_losses(found) and found.keys() >= {"since_logged", "logged", "last_logged"},
    "files": _is_map(_is_file),
}
"""Key of a manifest -> function that checks its value."""


def damage(directory: Path) -> str | None:
    """The first fault found in a checkpoint's files; None if there is none. Reads all files."""
    missing = [pattern.replace("*", "") for pattern in REQUIRED if not any(directory.glob(pattern))]
    if missing:
        return f"it has no {missing[0]}, so that training could not go on exactly"
    try:
        manifest = read_manifest(directory)
    except ValueError as error:
        return str(error)
    if manifest is None:
        return None
    listed, found = manifest["files"], _files(directory)
    if gone := sorted(listed.keys() - found):
        return f"{gone[0]} is missing"
    if foreign := sorted(name for name in found - listed.keys() if Path(name).suffix in LOADED):
        return f"{foreign[0]} was added after the checkpoint was written; move it elsewhere"
    for name, file in listed.items():
        if (size := (directory / name).stat().st_size) != file["bytes"]:
            return f"{name} has {size} bytes, {file['bytes']} were written"
    for name, file in _describe_all(directory, listed).items():
        if file["sha256"] != listed[name]["sha256"]:
            return f"{name} has SHA-256 {file['sha256']}, what was written had {listed[name]['sha256']}"
    return None


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, newest first, by step."""
    found = (path for path in run_dir.glob("*") if re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-\d+", path.name))
    return sorted(filter(Path.is_dir, found), key=lambda path: -int(path.name.split("-")[1]))


def newest_whole(run_dir: Path, besides: Path | None = None) -> Path | None:
    """The newest checkpoint that its manifest proves; None if there is none. Reads all files of each one tried."""
    others = (path for path in checkpoints(run_dir) if besides is None or path.resolve() != besides.resolve())
    return next((path for path in others if (path / MANIFEST).is_file() and damage(path) is None), None)


def _files(directory: Path) -> set[str]:
    found = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    return found - {MANIFEST}


def describe(path: Path) -> dict[str, Any]:
    """Size and SHA-256 of a file."""
    with path.open("rb") as stream:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _describe_all(directory: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    names = sorted(names)
    with ThreadPoolExecutor(4) as threads:  # hashing leaves the GIL to others
        return dict(zip(names, threads.map(describe, map(directory.joinpath, names)), strict=True))


# --- facts of a run ---------------------------------------------------------------------------------------------------


def run_facts(model: nn.Module, optim: str) -> dict[str, str]:
    """Facts that must be the same in the run that resumes: description -> value.

    A hash of the frozen vectors (norms, biases) tells base models of one architecture apart, in any precision. Packed
    weights, which are vectors of bytes, are left out: a run may go on with them on another device or in another format.
    All ranks must call it if FSDP2 divides the model.
    """
    config, vectors = _lora_config(model), hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and parameter.is_floating_point() and not parameter.requires_grad:
            value = whole(parameter, ranks()) if is_sharded(parameter) else whole_vector(parameter.detach())
            vectors.update(name.encode() + value.detach().float().cpu().numpy().tobytes())
    return {
        "expert_format": next(iter(find_experts(model).values())).layer.format,
        "expert_lora": ", ".join(sorted(trained_forms(model))) or "none",
        "optim": optim.removesuffix("_fused"),
        "base model (SHA-256 of its norms)": vectors.hexdigest(),
        # An adapter's tensors do not show its scaling.
        **{name: json.dumps(getattr(config, name), sort_keys=True) for name in _STRENGTH if config is not None},
    }


def trained_forms(model: nn.Module) -> set[str]:
    """The forms, of `EXPERT_LORA`, that the trained LoRA on routed experts has."""
    return {
        layer.forms[adapter]
        for layer in expert_layers(model).values()
        for adapter in layer.forms
        if any(tensor.requires_grad for *_, tensor in layer.tensors(adapter))
    }


_STRENGTH = ("lora_alpha", "alpha_pattern", "use_rslora")
SETTINGS = (
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("max_grad_norm", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("seed", "data_seed", "bf16", "fp16", "label_smoothing_factor", "neftune_noise_alpha"),
)
"""Fields of `TrainingArguments` that affect a run's result."""


def settings_of(trainer: Any) -> dict[str, Any]:
    """Settings that may differ in the run that resumes: name -> value."""
    found = {name: getattr(trainer.args, name, None) for name in SETTINGS}
    found = {name: getattr(value, "value", value) for name, value in found.items()}
    found["rank 0's experts of the first layer"] = str(next(iter(find_experts(trainer.model).values())).held)
    return found | {"lora_dropout": getattr(_lora_config(trainer.model), "lora_dropout", None)}


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two results of `settings_of`, each with both values."""
    return [f"{name} was {then[name]}, it is {now[name]}" for name in now if name in then and then[name] != now[name]]


def _lora_config(model: nn.Module) -> Any:
    """The configuration of the trained adapter; None if there is none."""
    adapted: Any = next((m for m in model.modules() if isinstance(m, PeftModel)), None)
    return None if adapted is None else adapted.peft_config[adapted.active_adapters[0]]


def data_facts(trainer: Any) -> dict[str, int | None]:
    """Facts that the order of the data depends on: description -> value."""
    dataset, args = trainer.train_dataset, trainer.args
    different = args.world_size // tp_size_of(trainer.model)  # ranks of a tensor parallel group have the same examples
    return {
        "examples": len(dataset) if hasattr(dataset, "__len__") else None,
        "examples a step": args.train_batch_size * args.gradient_accumulation_steps * different,
    }


def parameter_facts(model: nn.Module, optimizer: Any, together: Ranks | None = None) -> list[dict[str, Any]]:
    """Name, shape and counts of nonzero values in each state tensor, for each parameter in the optimizer's order.

    The counts do not depend on the number of threads, and take one pass over the state. Those of parameters that ranks
    share are of all ranks, which must call it.
    """
    held, shards, names = held_rows(model), shards_of(model), names_of(model, optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = optimizer.state_dict()["state"]  # indexed by position in the groups
    counted = [{key: _count(each) for key, each in sorted(states.get(at, {}).items())} for at in range(len(names))]
    if together is not None:
        divided = {at for at, name in enumerate(names) if name in held or is_sharded(parameters[at])}
        pieces = {at for at, name in enumerate(names) if name in shards}
        by_rank = together.gather({at: counted[at] for at in divided | pieces})
        for at in divided | pieces:
            parts = by_rank if at in divided else by_rank[: together.tp_size]
            counted[at] = {key: _sum([rank[at][key] for rank in parts]) for key in counted[at]}
    return [
        {
            "name": name,
            "shape": _whole_shape(parameter, held.get(name), shards.get(name)),
            "state": {key: _told(value) for key, value in values.items()},
        }
        for name, parameter, values in zip(names, parameters, counted, strict=True)
    ]


def _whole_shape(parameter: torch.Tensor, held: HeldExperts | None, shard: Shard | None) -> list[int]:
    """The parameter's shape if one process held all of it."""
    if shard is not None:
        return shard.shape(parameter)
    return list(parameter.shape) if held is None else [held.num_experts, *parameter.shape[1:]]


_Counts = tuple[str, int, int]
"""A tensor's dtype, how many of its values are not zero, and how many it has."""


def _count(value: Any) -> _Counts | float | str:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return str(value.dtype), int(torch.count_nonzero(local(value))), local(value).numel()
    if isinstance(value, torch.Tensor):
        return float(local(value).sum())  # of a sharded one rank 0 has the value, whose count `_sum` takes
    if isinstance(value, int | float):
        return float(value)
    return type(value).__name__


def _sum(parts: list[Any]) -> Any:
    if not isinstance(parts[0], tuple):
        return parts[0]
    return parts[0][0], sum(part[1] for part in parts), sum(part[2] for part in parts)


def _told(value: _Counts | float | str) -> float | str:
    return f"{value[0]}, {value[1]} of {value[2]} not zero" if isinstance(value, tuple) else value


def other_parameters(then: list[dict[str, Any]], model: nn.Module) -> str | None:
    """The first difference between a model's trained parameters and those in `then`; None if there is none."""
    old = {fact["name"]: fact["shape"] for fact in then}
    held, shards = held_rows(model), shards_of(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    new = {name: _whole_shape(p, held.get(name), shards.get(name)) for name, p in trained.items()}
    if gone := [name for name in old if name not in new]:
        return f"it trained {len(gone)} parameters that are not trained now, the first is {gone[0]}"
    if added := [name for name in new if name not in old]:
        return f"it did not train {len(added)} parameters that are trained now, the first is {added[0]}"
    for name, shape in old.items():
        if shape != new[name]:
            return f"{name} has shape {shape} in it and {new[name]} now"
    return None


def other_state(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> str | None:
    """The first difference, with both values, between two `parameter_facts` of the same parameters; None if none."""
    for index, (old, new) in enumerate(zip(then, now, strict=True)):
        if old["name"] != new["name"]:
            return f"parameter {index} of the optimizer was {old['name']} and is {new['name']} now"
        for key in sorted(old["state"] | new["state"]):
            written, loaded = (fact["state"].get(key, "absent") for fact in (old, new))
            if written != loaded:
                return f"the optimizer's {key} of {old['name']} was ({written}), what it loaded is ({loaded})"
    return None
