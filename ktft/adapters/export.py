"""Adapters for other programs. A target is a row of `TARGETS`; what it cannot hold is refused, with the tensor's name.

Sources of what each target loads: PEFT 0.18.1, `tuners/lora/layer.py`; vLLM 0.32, `vllm/lora`; SGLang 0.5.23,
`sglang/srt/lora`; llama.cpp, `convert_lora_to_gguf.py`, `src/llama-adapter.cpp` and `src/models`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktft.adapters.export_peft import arrange
from ktft.adapters.export_serving import SGLANG, VLLM, even_out
from ktft.adapters.files import CARD, CONFIG, MEANING, LazyTensor, saving, write_tensors
from ktft.adapters.opened import OpenedAdapter
from ktft.checkpoint.files import to_json

Progress = Callable[[str, int], None]
Layout = Callable[[OpenedAdapter], tuple[dict[str, Any], dict[str, LazyTensor]]]


@dataclass(frozen=True)
class Target:
    """A program that loads an adapter directory: its name, its layout, and how a person loads it there.

    `usage` has {base}, {out} and {rank} in braces.
    """

    name: str
    layout: Layout
    usage: str


TARGETS = {
    "peft": Target(
        "PEFT 0.18 on transformers 5",
        arrange,
        'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{base}"), "{out}")',
    ),
    "vllm": Target(
        "vLLM",
        lambda adapter: even_out(adapter, VLLM),
        "vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules adapter={out}",
    ),
    "sglang": Target(
        "SGLang",
        lambda adapter: even_out(adapter, SGLANG),
        "python -m sglang.launch_server --model-path {base} --enable-lora --lora-paths adapter={out} "
        "--max-lora-rank {rank}",
    ),
}
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM's --max-lora-rank can be."""


def export(adapter: OpenedAdapter, target: str, out: Path, progress: Progress) -> str:
    """Write an adapter for a target of `TARGETS` into the directory `out`, new or empty. Returns how it is used.

    Raises:
        ValueError: `out` holds something, or the target cannot hold what the adapter has; the message has the cure.
        OSError: the disk is full, among others. `out` holds nothing new then.
    """
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty; name a new directory")
    row = TARGETS[target]
    config, tensors = row.layout(adapter)
    record = {field: config[field] for field in MEANING} | {"model_type": adapter.base.model_type}
    rank = max(config["r"], *config["rank_pattern"].values(), 1)
    usage = row.usage.format(base=config["base_model_name_or_path"], out=out, rank=_served_rank(target, rank))
    with saving(out, sum(tensor.nbytes for tensor in tensors.values())) as scratch:
        (scratch / CONFIG).write_bytes(to_json(_listed(config)))
        (scratch / CARD).write_text(_card(adapter, row.name, usage))
        write_tensors(scratch, tensors, record, progress)
    return usage


def _served_rank(target: str, rank: int) -> int:
    if target != "vllm":
        return rank
    if rank > VLLM_RANKS[-1]:
        raise ValueError(f"the adapter has rank {rank}, vLLM loads {VLLM_RANKS[-1]} at most; use ktft merge")
    return next(each for each in VLLM_RANKS if each >= rank)


def _listed(config: dict[str, Any]) -> dict[str, Any]:
    """JSON has no sets and no enumerations."""
    listed = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    plain: dict[str, Any] = json.loads(json.dumps(listed, default=lambda value: getattr(value, "value", str(value))))
    return plain


def _card(adapter: OpenedAdapter, name: str, usage: str) -> str:
    return (
        f"---\nlibrary_name: peft\n---\n# LoRA adapter for {name}\n\nMade by `ktft export` from `{adapter.directory}`, "
        f"for this program alone: keep the original, from which other exports are made.\n```\n{usage}\n```\n"
    )
