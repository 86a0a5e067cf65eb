"""What is known of a model before it is loaded: its config, and its shards' headers where they are."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from ktft.checkpoint.families import family_of
from ktft.checkpoint.reader import INDEX_NAME, SINGLE_NAME, CheckpointReader
from ktft.model.shape import ModelShape, shape_of
from ktft.train.recipe import weight_bytes_of

_SAMPLE = 256 << 20
_SAMPLE_SECONDS = 1.0


@dataclass(frozen=True)
class ModelSource:
    """A model on disk, or its config alone.

    Attributes:
        name: the directory's or the file's.
        model: on meta, with empty `KtftExperts`.
        expert_bytes, other_bytes: of the checkpoint's tensors.
        from_shards: these are the headers', not computed from the config.
        method: the checkpoint's quantization, None for plain weights.
        shard: a shard to measure the disk on.
    """

    name: str
    config: PreTrainedConfig
    shape: ModelShape
    model: nn.Module
    expert_bytes: int
    other_bytes: int
    from_shards: bool
    method: str | None
    shard: Path | None


def read_source(path: Path) -> ModelSource:
    """Read a model directory, or a config.json.

    Raises:
        ValueError: no config.json there, one that transformers cannot read, or a model that ktft does not support.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} has no config.json; give a model's directory, or its config.json")
    try:
        config = AutoConfig.from_pretrained(file, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no config that transformers can read: {str(error).splitlines()[0]}") from None
    shape, model = shape_of(config)
    quantization = getattr(config, "quantization_config", None)
    method, bits = _expert_bits(quantization, 8 * weight_bytes_of(config))
    common: dict[str, Any] = {
        "name": file.parent.resolve().name if file.name == "config.json" else file.name,
        "config": config,
        "shape": shape,
        "model": model,
        "method": method,
    }
    reader = _open(path) if path.is_dir() else None
    if reader is None:
        other_bits = 8 if method == "fp8" else 8 * weight_bytes_of(config)
        return ModelSource(
            expert_bytes=int(shape.expert_parameters * bits / 8),
            other_bytes=shape.other_parameters * other_bits // 8,
            from_shards=False,
            shard=None,
            **common,
        )
    is_expert = family_of(config.model_type).expert_pattern()
    sizes = {True: 0, False: 0}
    for name, entry in reader.tensors.items():
        sizes[bool(is_expert.match(name))] += entry.nbytes
    shard = max({entry.file for entry in reader.tensors.values()}, key=lambda each: each.stat().st_size)
    return ModelSource(expert_bytes=sizes[True], other_bytes=sizes[False], from_shards=True, shard=shard, **common)


def _open(directory: Path) -> CheckpointReader | None:
    """The checkpoint, None where there is none yet. A damaged one is an error."""
    if not (directory / SINGLE_NAME).is_file() and not (directory / INDEX_NAME).is_file():
        return None
    try:
        reader = CheckpointReader.from_directory(directory)
    except FileNotFoundError:  # shards still to be downloaded
        return None
    return reader if reader.tensors else None


def _expert_bits(quantization: Any, plain: int) -> tuple[str | None, float]:
    """Quantization method, and bits of an expert's weight on disk, scales included."""
    if quantization is None:
        return None, plain
    values = quantization if isinstance(quantization, Mapping) else quantization.to_dict()
    method = str(getattr(values.get("quant_method"), "value", values.get("quant_method")))
    if method == "fp8":
        return method, 8 + 32 / 128**2
    if method == "mxfp4":
        return method, 4.25
    if method in ("gptq", "awq"):
        bits, group = int(values.get("bits", 4)), int(values.get("group_size", 128))
        return method, bits + (16 + bits) / max(group, 1)
    groups = values.get("config_groups") or {}
    for group in groups.values():
        weights = group.get("weights") or {}
        bits, size = int(weights.get("num_bits") or 8), int(weights.get("group_size") or 0)
        return method, bits + (16 / size if size > 0 else 0)
    return method, 8


def disk_rate(shard: Path) -> float:
    """Bytes/s that a shard is read at, from the disk and not from memory."""
    descriptor = os.open(shard, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        buffer, done, start = bytearray(8 << 20), 0, time.perf_counter()
        while done < _SAMPLE and time.perf_counter() - start < _SAMPLE_SECONDS:
            count = os.preadv(descriptor, [buffer], done)
            if count == 0:
                break
            done += count
        return max(done, 1) / max(time.perf_counter() - start, 1e-9)
    finally:
        os.close(descriptor)
