"""Short runs of transformers' Trainer on tiny models, and what two runs that are the same have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from adapted import load
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

import ktft

DATA = [{"input_ids": ids, "labels": ids} for ids in torch.arange(3, 131).reshape(8, 16)]
STATE = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def adapted(path: Path, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | options
    return ktft.get_peft_model(load(path), LoraConfig(**lora))


def arguments(output: Path, **overrides: Any) -> TrainingArguments:
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
    return TrainingArguments(**settings | overrides)


def losses(trainer: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


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
    """On a new model, with dropout, two batches a step, four steps an epoch, logs every other step."""
    config = ktft.KtftConfig(**{"expert_format": "int8", "threads": 1} | (settings or {}))
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config, dtype=torch.float32)
    torch.manual_seed(0)
    options = {"r": 2, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}
    model = ktft.get_peft_model(model, LoraConfig(**options | (lora or {})))
    arguments = {
        "output_dir": str(output),
        "use_cpu": True,
        "max_steps": 7,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 5e-3,
        "logging_steps": 2,
        "save_steps": 3,
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = TrainingArguments(**arguments | overrides)
    return cls(model, args, train_dataset=DATA, eval_dataset=DATA[:2], callbacks=callbacks)


def history(run: transformers.Trainer) -> list[dict[str, float]]:
    times = ("runtime", "per_second")
    return [{k: v for k, v in entry.items() if not k.endswith(times)} for entry in run.state.log_history]


def require_same_end(run: transformers.Trainer, whole: transformers.Trainer, step: int = 7) -> None:
    assert history(run) == history(whole)
    for name in STATE:
        one, two = (Path(r.args.output_dir, f"checkpoint-{step}", name) for r in (run, whole))
        assert one.read_bytes() == two.read_bytes(), name
