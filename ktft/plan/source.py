"""The facts known about a model before it is loaded: its config, and the headers of its shards if it has any."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from ktft.checkpoint.cache import PackedCache
from ktft.checkpoint.gguf_source import GgufReader, gguf_plan
from ktft.checkpoint.reader import BITS, CONFIG_NAME, INDEX_NAME, SINGLE_NAME, CheckpointReader
from ktft.checkpoint.schemes import PLAIN_SCHEME, Scheme, scheme_of
from ktft.config import DEFAULT_EXPERT_FORMAT, Settings
from ktft.model.dense_memory import released_format
from ktft.model.experts import experts_family
from ktft.model.shape import ModelShape, MoeShape, shape_of
from ktft.sources import is_gguf
from ktft.train.recipe import weight_bytes_of

_SAMPLE = 256 << 20
_SAMPLE_SECONDS = 1.0


@dataclass(frozen=True)
class ModelSource:
    """A model on disk, or only its config.

    Attributes:
        name: the name given to `read_source`, or that of the directory or file.
        model: the model on the meta device, with empty `KtftExperts`.
        expert_bytes, other_bytes: bytes of the checkpoint's tensors, for routed experts and for everything else.
        from_shards: whether these sizes are read from the files; if not, they are computed from the config.
        scheme: the checkpoint's quantization, or None for plain weights.
        expert_format: the format of experts that `ktft convert` packed, or None for a checkpoint as released.
        default_format: the format of experts if none is asked for.
        dense_format: the format that keeps the checkpoint's other weights exactly, beside the model's own dtype.
        shard: a file on which the disk's rate can be measured.
    """

    name: str
    config: PreTrainedConfig
    shape: ModelShape
    model: nn.Module
    expert_bytes: int
    other_bytes: int
    from_shards: bool
    scheme: str | None
    expert_format: str | None
    default_format: str
    dense_format: str | None
    shard: Path | None


def read_source(path: Path, settings: Settings, name: str | None = None, ranks: int = 1) -> ModelSource:
    """Read a model directory, as released or converted, or a config.json.

    Args:
        path: the directory or file, as returned by `ktft.checkpoint.hub.model_path`.
        settings: `expert_checkpoint` names the directory of the experts if they are not in `path`.
        name: the model's name in the report; None takes the name of the directory or file.
        ranks: how many processes share the experts; the shape is then that of the first one's share.

    Raises:
        ValueError: transformers cannot read config.json, ktft does not support the model or its quantization, shards
            are damaged, or the experts were converted to a format other than the one in `settings`.
    """
    file = path / CONFIG_NAME if path.is_dir() else path
    try:
        config = AutoConfig.from_pretrained(file, trust_remote_code=False)
        scheme = scheme_of(json.loads(file.read_bytes()), str(file))
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file} is no config that transformers can read: {str(error).splitlines()[0]}") from None
    shape, model = shape_of(config, ranks=ranks)
    reader = _open(path) if path.is_dir() else None
    experts = Path(settings.expert_checkpoint or path)
    gguf = GgufReader(experts) if settings.expert_checkpoint is not None and is_gguf(experts) else None
    packed = PackedCache.find(experts, settings.verify_checksums) if experts.is_dir() and gguf is None else None
    expert_format = None if packed is None else packed.check_format(settings.expert_format)
    if packed is not None:
        packed.check_model(config.model_type, shape.moe)
    if reader is None:
        plain = weight_bytes_of(config)
        other_bytes = shape.other_parameters * (plain if scheme.dense_bytes is None else scheme.dense_bytes)
        expert_bytes = sum(int(_expert_bytes(moe, scheme, plain) / moe.held.share) for moe in shape.moe.values())
    else:
        is_expert = experts_family(model).expert_pattern()
        other_bytes = sum(entry.nbytes for entry in reader.tensors.values() if not is_expert.match(entry.name))
        if packed is None and gguf is None:
            source = reader if settings.expert_checkpoint is None else CheckpointReader.from_directory(experts)
            expert_bytes = sum(entry.nbytes for entry in source.tensors.values() if is_expert.match(entry.name))
    if gguf is not None:
        gguf_plan(gguf, experts_family(model), shape.moe, config.get_text_config().num_hidden_layers)
        expert_bytes = sum(entry.nbytes for entry in gguf.tensors.values())
    return ModelSource(
        name=name or file.parent.resolve().name if file.name == CONFIG_NAME else file.name,
        config=config,
        shape=shape,
        model=model,
        expert_bytes=expert_bytes if packed is None else packed.nbytes(),
        other_bytes=other_bytes,
        from_shards=reader is not None,
        scheme=None if scheme is PLAIN_SCHEME else scheme.name,
        expert_format=expert_format,
        default_format=DEFAULT_EXPERT_FORMAT if gguf is None else gguf.expert_format,
        dense_format=released_format(scheme),
        shard=None if reader is None else max(reader.files, key=lambda each: each.stat().st_size),
    )


def _open(directory: Path) -> CheckpointReader | None:
    """The checkpoint, or None if there is none yet. Raises ValueError if it is damaged."""
    if not (directory / SINGLE_NAME).is_file() and not (directory / INDEX_NAME).is_file():
        return None
    try:
        reader = CheckpointReader.from_directory(directory)
    except FileNotFoundError:  # some shards are not downloaded yet
        return None
    return reader if reader.tensors else None


def _expert_bytes(moe: MoeShape, scheme: Scheme, plain: int) -> int:
    """Bytes on disk of one layer's experts in the layout of `scheme`; plain weights take `plain` bytes each."""
    if scheme is PLAIN_SCHEME:
        return moe.parameters * plain
    hidden, inner = moe.hidden_size, moe.intermediate_size
    matrices = (len(moe.projections) - 1) * _matrix_bytes(scheme, inner, hidden) + _matrix_bytes(scheme, hidden, inner)
    return moe.num_experts * matrices


def _matrix_bytes(scheme: Scheme, rows: int, cols: int) -> int:
    total = 0
    for role, (shape, *_) in scheme.shapes(rows, cols).items():
        part = scheme.parts[role]
        if not part.optional:
            # scales may have several dtypes, of which 16-bit ones are the most common
            bits = BITS["F16" if "F16" in part.dtypes else part.dtypes[0]]
            total += math.prod(shape) * bits // 8
    return total


def disk_rate(shard: Path) -> float:
    """Measure the bytes/s at which a shard is read from the disk, after dropping it from the page cache."""
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
