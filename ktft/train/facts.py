"""The facts of a run: machine, versions, model, adapter, data and settings, each read from the running objects."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sized
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

from peft import PeftModel
from torch import nn
from transformers import TrainerState, TrainingArguments

from ktft import native, system
from ktft.adapters.peft import expert_layers
from ktft.device import accelerators
from ktft.model.experts import experts_family
from ktft.train.report import Report
from ktft.versions import TESTED_VERSIONS, version_of

TOLD = (
    *("stage", "dataset", "eval_dataset", "val_size", "max_samples", "template", "cutoff_len", "max_length"),
    *("packing", "neat_packing", "train_on_prompt", "mask_history", "streaming", "pref_loss", "pref_beta"),
)
"""Settings of data and method that the report states; TRL has them in the Trainer's arguments."""


@dataclass(frozen=True)
class Told:
    """Facts that a Trainer knows but does not pass to callbacks: settings of `TOLD`, and the numbers of samples."""

    precision: str = "not known"
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def by(cls, trainer: Any) -> Told:
        """Read the facts of any Trainer. LLaMA-Factory's arguments are found in a callback of its own."""
        sources = [trainer.args]
        for callback in trainer.callback_handler.callbacks:
            sources += [getattr(callback, name, None) for name in ("finetuning_args", "data_args")]
        found = {name: getattr(source, name, None) for source in sources for name in TOLD if hasattr(source, name)}
        settings = {name: _plain(value) for name, value in found.items() if value not in (None, False, 0)}
        counts = {"samples": _samples(trainer.train_dataset), "eval_samples": _samples(trainer.eval_dataset)}
        settings |= {name: count for name, count in counts.items() if count is not None}
        return cls(_precision(trainer), settings)


def _plain(value: Any) -> Any:
    if isinstance(value, bool | int | float):
        return value
    return ", ".join(value) if isinstance(value, list) else str(value)


def _precision(trainer: Any) -> str:
    accelerator, dtype = trainer.accelerator, getattr(trainer.model, "dtype", None)
    asked, as_is = accelerator.mixed_precision, f"{str(dtype).removeprefix('torch.')}, as the model is"
    if asked == "no" or accelerator.native_amp:
        return as_is if asked == "no" else f"{asked} by autocast"
    return f"{as_is}; {asked} was asked for and has no effect on a {accelerator.device.type.upper()}"


def facts_of(
    model: nn.Module,
    report: Report,
    args: TrainingArguments,
    state: TrainerState,
    told: Told,
    *,
    optimizer: Any,
    **_: Any,
) -> dict[str, Any]:
    """The facts of a run before its first step. The arguments are those of `on_train_begin`, and more are ignored."""
    config: Any = getattr(model, "config", None)
    optimizer = getattr(optimizer, "optimizer", optimizer)
    rates = list(dict.fromkeys(float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups))
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(),
        "versions": _versions(),
        "model": {
            "name": str(getattr(config, "_name_or_path", "")),
            "model_type": str(getattr(config, "model_type", "")),
            "family": experts_family(model).name,
        },
        "experts": {
            "layers": report.layers,
            "experts": report.num_experts,
            "format": report.format,
            "packed_bytes": report.packed_bytes,
            "isa": report.isa,
            "threads": report.threads,
            "numa_nodes": report.nodes,
        },
        "adapter": {"groups": [asdict(group) for group in report.groups], "lora": _lora(model), "file": None},
        "data": dict(told.settings),
        "training": {
            "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            "learning_rate": rates[0] if len(rates) == 1 else rates,
            "lr_scheduler_type": str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
            "warmup_steps": args.get_warmup_steps(state.max_steps),
            "max_steps": state.max_steps,
            "per_device_train_batch_size": state.train_batch_size or args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "gradient_checkpointing": any(getattr(each, "gradient_checkpointing", False) for each in model.modules()),
            "max_grad_norm": args.max_grad_norm,
            "precision": told.precision,
            "seed": args.seed,
        },
    }


def _samples(dataset: Any) -> int | None:
    """The number of samples, summed over several data sets; None for a stream."""
    if isinstance(dataset, Mapping):
        counts = [_samples(each) for each in dataset.values()]
        return sum(count for count in counts if count is not None) or None
    return len(dataset) if isinstance(dataset, Sized) else None


def _lora(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Adapter name -> its settings and the last name parts of its modules, for each adapter that is trained."""
    configs: dict[str, Any] = next((each.peft_config for each in model.modules() if isinstance(each, PeftModel)), {})
    trained = [name for name, p in model.named_parameters() if p.requires_grad and ".lora_" in name]
    found = {}
    for adapter, config in configs.items():
        own = [name for name in trained if adapter in name.split(".")]
        if own:
            found[adapter] = {
                **{key: getattr(config, key, None) for key in ("r", "lora_alpha", "lora_dropout", "use_rslora")},
                "modules": sorted({name.split(".lora_")[0].rpartition(".")[2] for name in own}),
            }
            for key in ("rank_pattern", "alpha_pattern", "modules_to_save"):
                if getattr(config, key, None):
                    found[adapter][key] = getattr(config, key)
            forms = {layer.forms[adapter] for layer in expert_layers(model).values() if adapter in layer.forms}
            if forms:
                found[adapter]["expert_lora"] = forms.pop()
    return found


def _machine() -> dict[str, Any]:
    memory, limit = system.memory().get("MemTotal", 0), system.cgroup_memory_limit()
    return {
        "cpu": system.cpu_name(),
        "cores": int(native.topology()["cores"]),
        "memory_bytes": min(memory, limit or memory),
        "gpus": [each.name() for each in accelerators()],
        "kernel": platform.release(),
    }


def _versions() -> dict[str, str]:
    found = {package: version_of(package) for package in ("ktft", "torch", *TESTED_VERSIONS)}
    return {"python": platform.python_version()} | {name: it for name, it in found.items() if it is not None}
