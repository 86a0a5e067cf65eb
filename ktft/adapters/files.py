"""Adapters on disk: directories as PEFT writes them, with a standard name for every expert's tensors.

The safetensors metadata of a file that ktft wrote has a CRC-32 of every tensor and the settings that decide what the
tensors mean, so that ktft notices a damaged file or an edited configuration. Other software ignores it.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftConfig
from peft.utils import get_peft_model_state_dict
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME
from torch import Tensor

from ktft.adapters.below import BELOW, Below
from ktft.adapters.lora import KtftExpertsLora
from ktft.adapters.tensor_parallel import is_in_pieces
from ktft.checkpoint.cache import read_metadata
from ktft.checkpoint.files import CRC32, NewTensor, sync_directory, write_safetensors
from ktft.checkpoint.hub import FAILURES, local_path, not_fetched
from ktft.checkpoint.lock import LOCK, locked
from ktft.checkpoint.reader import DTYPES, CheckpointReader
from ktft.checkpoint.schemes import PLAIN

CONFIG = "adapter_config.json"
CARD = "README.md"
HUB_KEYS = ("subfolder", "revision", "cache_dir", "token")
RECORD = "ktft"
"""Metadata key in an adapter file. Its JSON holds `model_type` and the fields of `MEANING` as they were when saved."""
MEANING = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
"""Fields of adapter_config.json that, with the tensors' names and shapes, decide what an adapter computes."""
BASE = "base_directory"
"""Metadata key within `RECORD`. It maps the base model's name to its absolute path, if the name was a directory."""
SCRATCH = ".saving-"
"""Prefix of the name of the folder in which an adapter is being saved."""
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

Tensors = dict[str, Tensor]
Progress = Callable[[str, int], None]
"""Called with the name and the bytes of each tensor that was written."""


# --- finding and reading ----------------------------------------------------------------------------------------------


def local_directory(path: str | os.PathLike[str], subfolder: str | None = None, **hub: Any) -> Path:
    """An adapter's directory, downloaded if it is on the Hugging Face Hub. Raises ValueError if it holds no adapter."""
    root = local_path("adapter", path)
    if root is None:
        try:
            root = Path(snapshot_download(str(path), allow_patterns=["*adapter_*", "*/adapter_*"], **hub))
        except FAILURES as error:
            raise ValueError(not_fetched("adapter", path, error)) from error
    directory = root / subfolder if subfolder else root
    for name in (CONFIG, SAFETENSORS_WEIGHTS_NAME):
        if not (directory / name).is_file():
            raise ValueError(f"{directory} has no {name}; give the directory that save_pretrained wrote")
    return directory


def read_config(directory: Path) -> LoraConfig:
    """An adapter's configuration.

    Raises ValueError if it is not LoRA, is damaged, or has been changed since the tensors beside it were saved.
    """
    try:
        config = PeftConfig.from_pretrained(str(directory))
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"{directory / CONFIG} is not an adapter's configuration: {error}") from None
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{directory} holds a {config.peft_type} adapter; ktft loads LoRA")
    recorded = read_own_metadata(directory).get(RECORD, {})
    for field in MEANING:
        found = getattr(config, field)
        if recorded.get(field, found) != found:
            raise ValueError(
                f"{directory / CONFIG} says {field}: {json.dumps(found)}, but its tensors were saved with {field}: "
                f"{json.dumps(recorded[field])}; set it back. The strength of a loaded adapter is changed by the "
                "set_scale method of its layers"
            )
    return config


def base_of(directory: Path) -> str | None:
    """The base model that an adapter names, as a path that is valid here if there is one, else as the config has it.

    A path in the configuration may be relative to the folder in which training was started.
    """
    named = read_config(directory).base_model_name_or_path
    recorded = dict(read_own_metadata(directory).get(RECORD, {}).get(BASE, {}))
    if named and not Path(named).exists() and os.path.isdir(there := str(recorded.get(named, ""))):
        return there
    return absolute(named) if named else None


def absolute(name: str) -> str:
    """The absolute path of a file or directory that exists; other names belong to the hub and are returned as given."""
    return os.path.abspath(name) if os.path.exists(name) else name


def read_own_metadata(directory: Path) -> dict[str, Any]:
    """The metadata that ktft wrote into an adapter file; empty for a file that other software wrote."""
    with open_tensors(directory) as file:  # this checks the header
        found = read_metadata(file.files[0])
    try:
        own = {key: dict(json.loads(found[key])) for key in (CRC32, RECORD) if key in found}
        if all(isinstance(each["path"], str) for each in own.get(RECORD, {}).get(BELOW, [])):
            return own
        raise ValueError
    except (TypeError, ValueError, KeyError, RecursionError):
        raise ValueError(f"{file.files[0]}: the metadata that ktft wrote is damaged; use another copy") from None


def open_tensors(directory: Path) -> CheckpointReader:
    """Open an adapter's tensors. Raises ValueError if the file is truncated or damaged."""
    return CheckpointReader([directory / SAFETENSORS_WEIGHTS_NAME])


# --- checking ---------------------------------------------------------------------------------------------------------


def adapter_tensors(
    model: Any,
    layers: Mapping[str, KtftExpertsLora],
    adapter_name: str,
    state_dict: Mapping[str, Tensor],
    save_embedding_layers: str | bool = "auto",
) -> Tensors:
    """An adapter's tensors, by their names on disk, from the state dict of a PEFT model with the experts in `layers`.

    PEFT chooses the tensors outside of the experts, by its option `save_embedding_layers`. The experts' tensors are
    views, one for each expert.
    """
    others = without_experts(state_dict, layers)
    tensors: Tensors = get_peft_model_state_dict(
        model, state_dict=others, adapter_name=adapter_name, save_embedding_layers=save_embedding_layers
    )
    # With a resized vocabulary PEFT adds all tensors of an embedding, including the copies around one held whole
    copies = {"original_module", "modules_to_save"}
    tensors = {name: tensor for name, tensor in tensors.items() if not copies & set(name.split("."))}
    for name, layer in layers.items():
        if adapter_name in layer.lora_A:
            for kind, projection, _ in layer.tensors(adapter_name):
                stacked, held = state_dict[f"{name}.{kind}.{adapter_name}.{projection}"], layer.experts.held
                if layer.is_shared(kind, adapter_name, projection):
                    tensors[f"{name}.{projection}.{kind}.weight"] = stacked
                    continue
                numbers: Sequence[int] = held.numbers
                if layer.whole:  # of all ranks
                    stacked, numbers = layer.whole[kind, adapter_name, projection], range(held.num_experts)
                for expert, tensor in zip(numbers, stacked, strict=True):
                    tensors[f"{name}.{expert}.{projection}.{kind}.weight"] = tensor
    return tensors


def without_experts(state_dict: Mapping[str, Tensor], layers: Iterable[str]) -> Tensors:
    """A state dict without the stacked LoRA of these layers, and without frozen weights that are divided over ranks."""
    prefixes = tuple(f"{name}.lora_" for name in layers)
    return {
        name: tensor
        for name, tensor in state_dict.items()
        if not name.startswith(prefixes) and not is_in_pieces(tensor)
    }


def names_elsewhere(layers: Mapping[str, KtftExpertsLora], adapter_name: str) -> set[str]:
    """Names on disk of an adapter's tensors for experts that other processes hold; see `adapter_tensors`."""
    return {
        f"{name}.{expert}.{projection}.{kind}.weight"
        for name, layer in layers.items()
        if adapter_name in layer.lora_A
        for kind, projection, _ in layer.stacks(adapter_name)
        for expert in set(range(layer.experts.held.num_experts)) - set(layer.experts.held.numbers)
    }


def check_loadable(
    directory: Path, expected: Mapping[str, Tensor], model_type: str, elsewhere: Collection[str] = ()
) -> None:
    """Compare an adapter with the tensors that a model expects, and read every value of these once.

    The tensors named in `elsewhere` are held by other processes; the file may have them or not.

    Raises ValueError if a tensor is missing or left over, has another shape or dtype, holds NaN or Inf, or is not what
    was saved; or if the adapter belongs to another model.
    """
    metadata = read_own_metadata(directory)
    check_model_type(directory, metadata, model_type)
    with open_tensors(directory) as file:
        check_fit(file, expected, elsewhere)
        for name in expected:
            read_checked(file, name, metadata.get(CRC32, {}))


def read_checked(file: CheckpointReader, name: str, checksums: Mapping[str, str]) -> Tensor:
    """Read a tensor. Raises ValueError if it holds NaN or Inf, or is not what was saved."""
    tensor = file.read(name)
    _refuse_unless_finite(name, tensor, str(file.files[0]))
    recorded, found = checksums.get(name), f"{zlib.crc32(_bytes(tensor)):08x}"
    if recorded not in (None, found):
        raise ValueError(
            f"{file.files[0]}: {name} is damaged, its CRC-32 is {found}, when saved it was {recorded}; use another copy"
        )
    return tensor


def check_model_type(directory: Path, metadata: Mapping[str, Any], model_type: str) -> None:
    """Raise ValueError if an adapter with this metadata was trained on another type of model."""
    trained_on = metadata.get(RECORD, {}).get("model_type", model_type)
    if trained_on != model_type:
        raise ValueError(f"{directory} was trained on a model of type {trained_on}, this one is {model_type}")


def check_fit(file: CheckpointReader, expected: Mapping[str, Tensor], elsewhere: Collection[str] = ()) -> None:
    """Compare a file's names, shapes and dtypes with the expected ones. Raises ValueError; see `check_loadable`."""
    problems = [
        f"{len(names)} tensors {what}, the first is {names[0]}"
        for what, names in (
            ("of the model are missing", sorted(expected.keys() - file.tensors.keys())),
            ("are left over", sorted(file.tensors.keys() - expected.keys() - set(elsewhere))),
        )
        if names
    ]
    dtypes: dict[str, str] = {}
    for name, entry in sorted(file.tensors.items()):
        shape = tuple(expected[name].shape) if name in expected else entry.shape
        alike = dtypes.setdefault(re.sub(r"\d+|lora_[AB]", "", name), entry.dtype)
        if entry.shape != shape:
            problems.append(f"{name} has shape {entry.shape} in the adapter and {shape} in the model")
        elif entry.dtype not in PLAIN:
            problems.append(f"{name} is {entry.dtype}, an adapter's tensors are {', '.join(PLAIN)}")
        elif entry.dtype != alike:
            problems.append(f"{name} is {entry.dtype}, its like in other layers or experts are {alike}")
        if len(problems) > 2:
            break
    if problems:
        raise ValueError(f"{file.files[0]} does not fit the model: {'; '.join(problems)}")


def _refuse_unless_finite(name: str, tensor: Tensor, where: str) -> None:
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ValueError(f"{where}: {name} holds NaN or Inf; use an earlier checkpoint")


def warn_of_another_base(config: LoraConfig, model_name: str) -> None:
    """Warn if the base model's name shows that the adapter belongs to another model; its shapes may be the same."""
    base = config.base_model_name_or_path or ""
    if base and model_name and Path(base).name != Path(model_name).name:
        logging.getLogger("ktft").warning(
            "the adapter was trained on %s, the model is %s: if these are other weights, its effect is another",
            base,
            model_name,
        )


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def saving(target: Path, nbytes: int, new: bool = False) -> Iterator[Path]:
    """A scratch directory to write `nbytes` into. Its files move into `target` if the block ends without an exception.

    Raises:
        OSError: the write failed, for instance because the disk is full. Nothing in `target` has changed then.
        ValueError: another process writes into `target`; or with `new`, it holds more than a killed process left.
    """
    untouched = f"what {target} held before is untouched"
    with locked(target, "saving an adapter") as first:
        for left in target.glob(f"{SCRATCH}*") if first else ():  # left by a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        if new and any(path.name != LOCK for path in target.iterdir()):
            raise ValueError(f"{target} is not empty; name a new directory")
        free = shutil.disk_usage(target).free
        if free < nbytes:
            raise OSError(
                errno.ENOSPC,
                f"the adapter needs {nbytes / 2**20:,.0f} MiB on disk, {free / 2**20:,.0f} MiB are free; make room or "
                f"save elsewhere; {untouched}",
                str(target),
            )
        with tempfile.TemporaryDirectory(dir=target, prefix=SCRATCH) as scratch:
            try:
                yield Path(scratch)
            except OSError as error:
                raise OSError(
                    error.errno, f"saving the adapter failed: {error.strerror or error}; {untouched}", str(target)
                ) from error
            move_files(Path(scratch), target)


def write_adapter(directory: Path, tensors: Tensors, config: PeftConfig, model_type: str, below: Below = ()) -> None:
    """Write adapter_model.safetensors with one tensor in memory at a time, and read it back.

    Raises ValueError if a tensor holds NaN or Inf, or differs from memory when it is read back.
    """
    record = {field: getattr(config, field) for field in MEANING} | {"model_type": model_type}
    record |= {BELOW: list(below)} if below else {}
    base = config.base_model_name_or_path or ""
    record |= {BASE: {base: os.path.abspath(base)}} if os.path.isdir(base) else {}

    def held(name: str) -> Tensor:
        tensor = tensors[name].detach().cpu()
        _refuse_unless_finite(name, tensor, "the adapter in memory")
        return tensor

    lazy = {name: LazyTensor(each.dtype, tuple(each.shape), partial(held, name)) for name, each in tensors.items()}
    write_tensors(directory, lazy, record)
    _compare(directory, tensors)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is computed, on the CPU, only when it is written."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(
    directory: Path,
    tensors: Mapping[str, LazyTensor],
    record: Mapping[str, Any],
    progress: Progress = lambda name, nbytes: None,
) -> None:
    """Write adapter_model.safetensors with one tensor in memory at a time."""
    # safetensors' order, which aligns
    lazy = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    entries = [NewTensor(name, _dtype_name(name, each.dtype), each.shape, each.nbytes) for name, each in lazy]

    def content() -> Iterator[Iterable[memoryview]]:
        for name, each in lazy:
            tensor = each.make()
            assert (tensor.dtype, tuple(tensor.shape)) == (each.dtype, each.shape), name
            yield (_bytes(tensor),)
            progress(name, each.nbytes)

    write_safetensors(directory / SAFETENSORS_WEIGHTS_NAME, entries, {RECORD: json.dumps(record)}, content())


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPE_NAMES:
        raise ValueError(f"{name} is {dtype}, which adapters are not saved in; cast it to float32 or bfloat16")
    return _DTYPE_NAMES[dtype]


def _compare(directory: Path, tensors: Tensors) -> None:
    """Compare names, shapes, dtypes and every bit of a file with the tensors in memory, one tensor at a time."""
    with open_tensors(directory) as file:
        check_fit(file, tensors)
        for name, tensor in tensors.items():
            found, held = file.read(name), tensor.detach().cpu()
            if found.dtype != held.dtype or not torch.equal(_raw(found), _raw(held)):
                raise ValueError(
                    f"{file.files[0]}: {name} was read back otherwise than it is in memory; the disk may be failing"
                )


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(_raw(tensor).numpy().data)


def move_files(source: Path, target: Path) -> None:
    """Move a directory's files into another, each whole or not at all."""
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, place)
        sync_directory(place.parent)
