"""Adapters for other programs, each a row of `TARGETS`. A tensor that a target cannot hold is named in an error.

What each target loads was read from these sources: PEFT 0.18.1, `tuners/lora/layer.py`; vLLM 0.32, `vllm/lora`; SGLang
0.5.23, `sglang/srt/lora`; llama.cpp, `convert_lora_to_gguf.py`, `src/llama-adapter.cpp` and `src/models`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from ktft.adapters import export_gguf, export_peft, export_serving, files
from ktft.adapters.below import require_merged
from ktft.adapters.saved import SavedAdapter
from ktft.checkpoint.files import to_json
from ktft.checkpoint.hub import require_found
from ktft.checkpoint.reader import CONFIG_NAME


@dataclass(frozen=True)
class Export:
    """A planned export: its size in bytes, its largest rank, and the function that writes it."""

    nbytes: int
    rank: int
    write: Callable[[Path, files.Progress], None]


@dataclass(frozen=True)
class ExportTarget:
    """A program that loads adapters: its name, how an export to it is planned, and the command that loads the result.

    `usage` contains the placeholders {base}, {out} and {rank}; `ranks` are the values that {rank} may have, if not any.
    """

    name: str
    plan: Callable[[SavedAdapter], Export]
    usage: str
    ranks: tuple[int, ...] = ()


Arrange = Callable[[SavedAdapter], tuple[dict[str, Any], dict[str, files.LazyTensor]]]


def _directory(arrange: Arrange) -> Callable[[SavedAdapter], Export]:
    """A planner for adapter directories in PEFT's form, from a function that arranges configuration and tensors."""

    def plan(adapter: SavedAdapter) -> Export:
        config, tensors = arrange(adapter)
        record = {field: config[field] for field in files.MEANING} | {"model_type": adapter.base.model_type}

        def write(directory: Path, progress: files.Progress) -> None:
            (directory / files.CONFIG).write_bytes(to_json(_plain(config)))
            files.write_tensors(directory, tensors, record, progress)

        return Export(_bytes(tensors), max(config["r"], *config["rank_pattern"].values(), 1), write)

    return plan


def _gguf(adapter: SavedAdapter) -> Export:
    arch, alpha, tensors = export_gguf.arrange(adapter)
    rank = max(place.r for place in adapter.places.values())
    return Export(_bytes(tensors), rank, lambda out, progress: export_gguf.write(out, arch, alpha, tensors, progress))


TARGETS = {
    "peft": ExportTarget(
        f"{export_peft.layout()} on transformers 5",
        _directory(export_peft.arrange),
        'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{out}")',
    ),
    "vllm": ExportTarget(
        "vLLM",
        _directory(partial(export_serving.even_out, server=export_serving.VLLM)),
        "vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules adapter={out}",
        ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
    ),
    "sglang": ExportTarget(
        "SGLang",
        _directory(partial(export_serving.even_out, server=export_serving.SGLANG)),
        "python -m sglang.launch_server --model-path {base} --enable-lora --max-lora-rank {rank} "
        "--lora-paths adapter={out}",
    ),
    "gguf": ExportTarget("llama.cpp", _gguf, f"llama-server -m BASE.gguf --lora {{out}}/{export_gguf.FILE}"),
}


def open_adapter(directory: Path, base: Path | None = None) -> SavedAdapter:
    """Open an adapter beside its base model: a directory, a config.json, or None for what the adapter's config names.

    Raises ValueError if there is no base model, it is not the adapter's, or `SavedAdapter` refuses the adapter.
    """
    config = files.local_directory(directory) / files.CONFIG
    named = base or files.base_of(config.parent)
    cure = "name its directory, or its config.json, with --base"
    if not named:
        raise ValueError(f"{config} names no base model; {cure}")
    try:
        require_found("the base model", named, CONFIG_NAME)
    except ValueError as error:
        raise ValueError(f"{error}; {cure}") from None
    try:
        found = AutoConfig.from_pretrained(str(named), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"the base model {named} has no config that can be read: {first}; {cure}") from None
    adapter = SavedAdapter(directory, found)
    where = Path(named).parent if Path(named).is_file() else Path(named)
    if adapter.below:
        require_merged(adapter.directory, adapter.below, where, f"ktft export {directory} OUT --to ... --base {{base}}")
    if adapter.below or not Path(named).is_file():
        adapter.config.base_model_name_or_path = files.absolute(str(where))
    return adapter


def plan(adapter: SavedAdapter, target: str) -> Export:
    """Plan an export to one of `TARGETS`. Raises ValueError if it cannot hold the adapter, or not apply all of it."""
    row = TARGETS[target]
    planned = row.plan(adapter)
    if row.ranks and planned.rank > row.ranks[-1]:
        raise ValueError(
            f"the adapter has rank {planned.rank}, {row.name} loads {row.ranks[-1]} at most; merge it (ktft merge)"
        )
    return planned


def export(adapter: SavedAdapter, target: str, planned: Export, out: Path, progress: files.Progress) -> str:
    """Write a planned export into the directory `out`, which must be new or empty. Returns the command that loads it.

    Raises ValueError if a tensor is damaged, OSError if the disk is full, for instance. `out` then holds nothing new.
    """
    row = TARGETS[target]
    rank = next((each for each in row.ranks if each >= planned.rank), planned.rank)
    usage = row.usage.format(base=adapter.config.base_model_name_or_path, out=out, rank=rank)
    with files.saving(out, planned.nbytes, new=True) as scratch:
        (scratch / files.CARD).write_text(
            f"---\nlibrary_name: peft\n---\n# LoRA adapter for {row.name}\n\nMade by `ktft export` from "
            f"`{adapter.directory}`, for this program alone; keep the original.\n```\n{usage}\n```\n"
        )
        planned.write(scratch, progress)
    return usage


def _bytes(tensors: dict[str, files.LazyTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _plain(config: dict[str, Any]) -> Any:
    """The configuration with sets and enumerations replaced by types that JSON has."""
    listed = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    return json.loads(json.dumps(listed, default=lambda value: getattr(value, "value", str(value))))
