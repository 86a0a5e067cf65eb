"""Show that no guard ends a healthy run: SFT and DPO through LLaMA-Factory, and a Trainer with unlabelled data.

    python tests/scripts/healthy_runs.py [--steps 300] [--seeds 10] [--first 0] [--kinds sft dpo masked]

Batch size, accumulation, dropout, warm-up, logging and checkpointing depend on the seed. The models are tiny and
untrained, so their loss begins at chance level; they learn their few samples by heart, so gradients become tiny. Prints
one line a run, and exits with 1 if a guard ended one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from adapted import load, lora_config
from tiny import factory_settings, write_checkpoint, write_data
from transformers import TrainerCallback, TrainingArguments

import ktft
from ktft.train.guards import GuardError
from ktft.train.run_report import JSON_NAME

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
KINDS = ("sft", "dpo", "masked")


class Norms(TrainerCallback):
    """The smallest logged gradient norm other than 0, and how often it was 0."""

    def __init__(self) -> None:
        self.least, self.zeros = float("inf"), 0

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        norm = (logs or {}).get("grad_norm")
        if norm:
            self.least = min(self.least, float(norm))
        elif norm is not None:
            self.zeros += 1


def settings(seed: int, steps: int, output: Path) -> dict[str, Any]:
    """Settings of transformers' Trainer, which depend on the seed."""
    return {
        "output_dir": str(output),
        "max_steps": steps,
        "seed": seed,
        "per_device_train_batch_size": (1, 2, 4)[seed % 3],
        "gradient_accumulation_steps": (1, 2)[seed % 2],
        "learning_rate": (1e-4, 1e-3, 5e-3)[(seed // 2) % 3],
        "lr_scheduler_type": ("cosine", "constant_with_warmup")[seed % 2],
        "warmup_steps": (0, 20)[(seed // 3) % 2],
        "logging_steps": (1, 10)[(seed // 2) % 2],
        "save_steps": 100,
        "save_total_limit": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }


def through_factory(stage: str, seed: int, steps: int, model: Path, data: Path, output: Path, norms: Norms) -> None:
    from llamafactory.train.tuner import run_exp

    own = {"stage": stage, "dataset": stage, "lora_rank": 4, "lora_dropout": (0.0, 0.1)[seed % 2]}
    own |= {"disable_gradient_checkpointing": bool(seed % 2)}
    run_exp(factory_settings(model, data, output, **own | settings(seed, steps, output)), callbacks=[norms])


def masked(seed: int, steps: int, model: Path, output: Path, norms: Norms) -> None:
    """A run of transformers' Trainer in which a third of the samples has no labels, and so have some batches."""
    base = load(model)
    torch.manual_seed(seed)
    lora = lora_config(lora_dropout=(0.0, 0.1)[seed % 2])
    rows = torch.randint(3, 250, (24, 24))
    labels = rows.clone()
    labels[:, :8] = -100
    labels[::3] = -100
    trainer = transformers.Trainer(
        ktft.get_peft_model(base, lora),
        TrainingArguments(**settings(seed, steps, output)),
        train_dataset=[{"input_ids": ids, "labels": own} for ids, own in zip(rows, labels, strict=True)],
        callbacks=[norms],
    )
    trainer.model_accepts_loss_kwargs = False  # the loss of a batch without labels would be 0/0
    trainer.compute_loss_func = lambda out, labels, num_items_in_batch=None: (
        torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        / max(int((labels[:, 1:] != -100).sum()), 1)
    )
    trainer.train()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="The first seed.")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tripped = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = str(Path(folder) / "cache")
        model = write_checkpoint("dsv3", Path(folder) / "model", **SMALL)
        data = write_data(Path(folder) / "data")
        for kind in asked.kinds:
            for seed in range(asked.first, asked.first + asked.seeds):
                output, norms, began = Path(folder) / f"{kind}-{seed}", Norms(), time.perf_counter()
                try:
                    if kind == "masked":
                        masked(seed, asked.steps, model, output, norms)
                    else:
                        through_factory(kind, seed, asked.steps, model, data, output, norms)
                except GuardError:
                    tripped += 1
                report = json.loads((output / JSON_NAME).read_text())
                losses = [loss for loss in report["logged"]["loss"] if loss is not None]
                last = report["steps"]["step"][-1]
                print(
                    f"{kind} seed {seed}: {report['ended']}, {last} steps, loss {losses[0]:.4g} -> {losses[-1]:.4g}, "
                    f"least norm {norms.least:.3g}, without gradient at {norms.zeros} logged steps, "
                    f"{time.perf_counter() - began:.0f} s",
                    flush=True,
                )
                logging.getLogger("ktft").setLevel(logging.WARNING)
    print(f"{tripped} of {len(asked.kinds) * asked.seeds} runs were ended by a guard")
    return int(tripped > 0)


if __name__ == "__main__":
    raise SystemExit(main())
