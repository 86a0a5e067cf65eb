"""Supervised fine-tuning with TRL: LoRA on int8 experts, attention and everything else that is linear.

    pip install './ktft[trl]' torch==2.13.0
    python examples/trl_sft.py --model build/demo/model --data build/demo/data     (both made by `make demo`)

A run that was stopped goes on from its last checkpoint with the same command and `--resume`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import peft
import torch
import typer
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import ktft


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder of a supported MoE.")],
    data: Annotated[Path, typer.Option(help="Folder with functions.json, in alpaca format.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and the adapter.")] = Path("build/trl_sft"),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 50,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint in the output folder.")] = False,
) -> None:
    """Train and save."""
    gpu = torch.cuda.is_available()
    records = json.loads((data / "functions.json").read_text(encoding="utf-8"))
    columns = {
        "prompt": [f"{record['instruction']}\n{record['input']}\n" for record in records],
        "completion": [record["output"] for record in records],
    }
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            model, quantization_config=ktft.KtftConfig(expert_format="int8"), dtype="float32"
        ),
        args=SFTConfig(
            str(out), use_cpu=not gpu, bf16=gpu, max_steps=steps, per_device_train_batch_size=8,
            learning_rate=5e-4, max_length=256, report_to="none",
            logging_steps=max(1, steps // 10), save_steps=max(1, steps // 2),
        ),
        train_dataset=Dataset.from_dict(columns),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    print(f"the adapter is in {out}; ktft.load_adapter(model, {str(out)!r}) loads it")


if __name__ == "__main__":
    typer.run(main)
