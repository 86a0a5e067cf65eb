"""Short runs of transformers' Trainer on tiny models, and a comparison of two runs that must be equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from adapted import load, lora_config
from transformers import TrainerCallback, TrainingArguments

import ktft

DATA = [{"input_ids": ids, "labels": ids} for ids in torch.arange(3, 131).reshape(8, 16)]
STATE = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def adapted(
    path: Path, dtype: torch.dtype = torch.float32, settings: dict[str, Any] | None = None, **lora: Any
) -> torch.nn.Module:
    """A model with new LoRA. `settings` are ktft's."""
    model = load(path, dtype, **settings or {})
    torch.manual_seed(0)
    return ktft.get_peft_model(model, lora_config(**lora))


def arguments(output: Path, cls: type[TrainingArguments] = TrainingArguments, **overrides: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(output),
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "learning_rate": 5e-3,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return cls(**settings | overrides)


def reduce_loss(run: transformers.Trainer, reduction: str) -> None:
    """Make the loss of a batch the sum or the mean over its labels, whatever their number in a step."""
    run.model_accepts_loss_kwargs = False
    run.compute_loss_func = lambda out, labels, num_items_in_batch=None: torch.nn.functional.cross_entropy(
        out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction
    )


def losses(trainer: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def logged(output: Path) -> list[dict[str, float]]:
    """What the run in a folder logged with a loss, in the order of its steps."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "loss" in entry]


def trainer(
    base: Path,
    output: Path,
    *,
    cls: type[transformers.Trainer] = transformers.Trainer,
    lora: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    callbacks: list[TrainerCallback] | None = None,
    **overrides: Any,
) -> transformers.Trainer:
    """A Trainer on a new model with dropout, two batches a step, four steps an epoch and a log every other step."""
    options = {"r": 2, "lora_dropout": 0.1} | (lora or {})
    model = adapted(base, settings={"expert_format": "int8"} | (settings or {}), **options)
    batches = {"max_steps": 7, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    steps = batches | {"lr_scheduler_type": "linear", "logging_steps": 2, "save_steps": 3}
    args = arguments(output, **steps | overrides)
    return cls(model, args, train_dataset=DATA, eval_dataset=DATA[:2], callbacks=callbacks)


def history(run: transformers.Trainer) -> list[dict[str, float]]:
    times = ("runtime", "per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(times)} for entry in run.state.log_history]


def require_same_end(run: transformers.Trainer, whole: transformers.Trainer, step: int = 7) -> None:
    assert history(run) == history(whole)
    for name in STATE:
        one, two = (Path(r.args.output_dir, f"checkpoint-{step}", name) for r in (run, whole))
        assert one.read_bytes() == two.read_bytes(), name
