"""Adapters on disk: directories as PEFT writes them, with a standard name for every expert."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig
from peft.utils import get_peft_model_state_dict
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open

from ktft.adapters.lora import KtftExpertsLora

Shapes = dict[str, tuple[int, ...]]

HUB_KEYS = ("subfolder", "revision", "cache_dir", "token")


def local_directory(path: str | os.PathLike[str], subfolder: str | None = None, **hub: Any) -> Path:
    """An adapter's directory; one of the Hugging Face Hub is downloaded. Raises ValueError if it is no adapter."""
    root = Path(path)
    if not root.is_dir():
        if root.is_absolute() or len(root.parts) != 2:
            raise ValueError(f"adapter {str(path)!r} is not a directory")
        root = Path(snapshot_download(str(path), allow_patterns=["*adapter_*", "*/adapter_*"], **hub))
    directory = root / subfolder if subfolder else root
    for name in ("adapter_config.json", SAFETENSORS_WEIGHTS_NAME):
        if not (directory / name).is_file():
            raise ValueError(f"{directory} has no {name}; give the directory that save_pretrained wrote")
    return directory


def read_config(directory: Path) -> LoraConfig:
    """An adapter's configuration. Raises ValueError if it is not LoRA."""
    config = PeftConfig.from_pretrained(str(directory))
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{directory} holds a {config.peft_type} adapter; ktft loads LoRA")
    return config


def standard_tensors(model: Any, layers: dict[str, KtftExpertsLora], adapter_name: str) -> Shapes:
    """Names and shapes that an adapter's file must have: PEFT's for all but experts, theirs counted one by one."""
    layers = {name: layer for name, layer in layers.items() if adapter_name in layer.lora_A}
    prefixes = tuple(f"{name}.lora_" for name in layers)
    others = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(prefixes)}
    tensors = get_peft_model_state_dict(model, state_dict=others, adapter_name=adapter_name)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, layer in layers.items():
        for kind, projection, stacked in layer.tensors(adapter_name):
            for expert in range(layer.experts.num_experts):
                shapes[f"{name}.{expert}.{projection}.{kind}.weight"] = tuple(stacked.shape[1:])
    return shapes


def check_file(directory: Path, expected: Shapes, values: bool = True) -> None:
    """Compare an adapter file with what the model holds, and look for NaN and Inf in `values`."""
    file = directory / SAFETENSORS_WEIGHTS_NAME
    with safe_open(file, framework="pt", device="cpu") as tensors:
        found = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        problems = [
            f"{len(names)} tensors {what}, the first is {names[0]}"
            for what, names in (
                ("of the model are missing", sorted(expected.keys() - found.keys())),
                ("are left over", sorted(found.keys() - expected.keys())),
            )
            if names
        ]
        problems += [
            f"{name} has shape {shape} in the adapter and {expected[name]} in the model"
            for name, shape in sorted(found.items())
            if expected.get(name, shape) != shape
        ][:1]
        if not problems and values:
            problems += [f"{name} holds NaN or Inf" for name in found if not _finite(tensors.get_tensor(name))][:1]
    if problems:
        raise ValueError(f"{file} does not fit the model: {'; '.join(problems)}")


def _finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def move_files(source: Path, target: Path) -> None:
    """Move a directory's files into another, each whole or not at all."""
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
