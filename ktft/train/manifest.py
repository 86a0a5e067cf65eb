"""What proves that a training checkpoint is whole and belongs to a run: `ktft_checkpoint.json`, written last."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ktft.checkpoint.files import sync_tree, to_json, write_whole
from ktft.model.experts import find_experts

MANIFEST = "ktft_checkpoint.json"
VERSION = 1
LOADED = frozenset({".safetensors", ".bin", ".pt", ".pth"})
"""Suffixes of files that a Trainer may load from a checkpoint. One that the manifest does not list is refused."""
REQUIRED = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "rng_state.pth")
"""Files without which a Trainer would resume with something reset, without an error."""


def seal(directory: Path, facts: Mapping[str, Any]) -> int:
    """Make a written checkpoint durable, then list its files' sizes and SHA-256 beside `facts`. Returns its bytes."""
    sync_tree(directory)
    files = _describe(directory, sorted(_files(directory)))
    write_whole(directory / MANIFEST, to_json({"version": VERSION, **facts, "files": files}))
    return sum(file["bytes"] for file in files.values())


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """A checkpoint's manifest; None if it has none, as those of plain transformers.

    Raises:
        ValueError: it is no JSON, or of another version.
    """
    path = directory / MANIFEST
    if not path.is_file():
        return None
    try:
        manifest: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if manifest.get("version") != VERSION:
        raise ValueError(f"{path} has version {manifest.get('version')}, this ktft reads version {VERSION}")
    return manifest


def damage(directory: Path) -> str | None:
    """What is wrong with a checkpoint's files, as far as it can be told; None if nothing is. Reads all of them."""
    missing = [name for name in REQUIRED if not (directory / name).is_file()]
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
    for name, file in _describe(directory, sorted(listed)).items():
        if file["sha256"] != listed[name]["sha256"]:
            return f"{name} has SHA-256 {file['sha256']}, what was written had {listed[name]['sha256']}"
    return None


def checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoints of a run, newest first, by step."""
    steps = {path: re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name) for path in run_dir.glob("*")}
    return sorted((p for p, step in steps.items() if step and p.is_dir()), key=lambda p: -int(p.name.split("-")[1]))


def newest_whole(run_dir: Path, besides: Path | None = None) -> Path | None:
    """The newest checkpoint that its manifest proves; None if there is none. Reads all files of those it looks at."""
    others = (path for path in checkpoints(run_dir) if besides is None or path.resolve() != besides.resolve())
    return next((path for path in others if (path / MANIFEST).is_file() and damage(path) is None), None)


def _files(directory: Path) -> set[str]:
    found = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    return found - {MANIFEST}


def _describe(directory: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    def one(name: str) -> tuple[str, dict[str, Any]]:
        with (directory / name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return name, {"bytes": (directory / name).stat().st_size, "sha256": digest}

    with ThreadPoolExecutor(4) as threads:  # hashing leaves the GIL to others
        return dict(threads.map(one, names))


# --- facts of a run ---------------------------------------------------------------------------------------------------


def run_facts(model: nn.Module, optim: str) -> dict[str, str]:
    """What must be the same in the run that resumes: description -> value.

    Base models of one architecture are told apart by their frozen vectors (norms, biases), whatever their precision.
    """
    vectors = hashlib.sha256()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not parameter.requires_grad:
            vectors.update(name.encode() + parameter.detach().float().cpu().numpy().tobytes())
    return {
        "expert_format": next(iter(find_experts(model).values())).layer.format,
        "optim": optim.removesuffix("_fused"),
        "base model (SHA-256 of its norms)": vectors.hexdigest(),
    }


def data_facts(trainer: Any) -> dict[str, int | None]:
    """What the order of the data depends on: description -> value."""
    dataset, args = trainer.train_dataset, trainer.args
    return {
        "examples": len(dataset) if hasattr(dataset, "__len__") else None,
        "examples a step": args.train_batch_size * args.gradient_accumulation_steps,
    }


def parameter_facts(model: nn.Module, optimizer: Any) -> list[dict[str, Any]]:
    """Of each parameter, in the optimizer's order: name, shape, and of each tensor of its state how much is not zero.

    Counts are exact whatever the threads, and take one pass over the state at memory speed.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = optimizer.state_dict()["state"]  # by place in the groups
    return [
        {
            "name": names.get(id(parameter), "not in the model"),
            "shape": list(parameter.shape),
            "state": {key: _fact(value) for key, value in sorted(states.get(place, {}).items())},
        }
        for place, parameter in enumerate(parameters)
    ]


def _fact(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        return f"{value.dtype}, {int(torch.count_nonzero(value))} of {value.numel()} not zero"
    if isinstance(value, torch.Tensor | int | float):
        return float(value)
    return type(value).__name__


def other_parameters(then: list[dict[str, Any]], model: nn.Module) -> str | None:
    """How the parameters that a model trains differ from those of `parameter_facts`; None if they do not."""
    old = {fact["name"]: fact["shape"] for fact in then}
    new = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    if gone := [name for name in old if name not in new]:
        return f"it trained {len(gone)} parameters that are not trained now, the first is {gone[0]}"
    if added := [name for name in new if name not in old]:
        return f"it did not train {len(added)} parameters that are trained now, the first is {added[0]}"
    for name, shape in old.items():
        if shape != new[name]:
            return f"{name} has shape {shape} in it and {new[name]} now"
    return None


def other_state(then: list[dict[str, Any]], now: list[dict[str, Any]]) -> str | None:
    """What tells two results of `parameter_facts` with the same parameters apart, with both values; None if nothing."""
    for index, (old, new) in enumerate(zip(then, now, strict=True)):
        if old["name"] != new["name"]:
            return f"parameter {index} of the optimizer was {old['name']} and is {new['name']} now"
        for key in sorted(old["state"] | new["state"]):
            written, loaded = (fact["state"].get(key, "absent") for fact in (old, new))
            if written != loaded:
                return f"the optimizer's {key} of {old['name']} was ({written}), what it loaded is ({loaded})"
    return None
