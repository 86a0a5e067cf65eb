"""Direct preference optimization with TRL: LoRA on int8 experts; the reference is the same model without its adapter.

    pip install './ktft[trl]' torch==2.13.0
    python examples/trl_dpo.py --model build/demo/model --data build/demo/data     (both made by `make demo`)

The rejected answer of each record is the answer of another one. `--adapter` trains an adapter further, as after SFT.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import peft
import torch
import typer
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import ktft


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder of a supported MoE.")],
    data: Annotated[Path, typer.Option(help="Folder with functions.json, in alpaca format.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints and the adapter.")] = Path("build/trl_dpo"),
    adapter: Annotated[Path | None, typer.Option(help="An adapter to train further.")] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 50,
) -> None:
    """Train and save."""
    gpu = torch.cuda.is_available()
    records = json.loads((data / "functions.json").read_text(encoding="utf-8"))
    answers = [record["output"] for record in records]
    columns = {
        "prompt": [f"{record['instruction']}\n{record['input']}\n" for record in records],
        "chosen": answers,
        "rejected": answers[1:] + answers[:1],
    }
    policy: Any = AutoModelForCausalLM.from_pretrained(
        model, quantization_config=ktft.KtftConfig(expert_format="int8"), dtype="float32"
    )
    lora = None
    if adapter is None:
        lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    else:
        policy = peft.PeftModel.from_pretrained(policy, adapter, is_trainable=True)
    trainer = DPOTrainer(
        model=policy,
        args=DPOConfig(
            str(out), use_cpu=not gpu, bf16=gpu, max_steps=steps, per_device_train_batch_size=4,
            learning_rate=5e-5, max_length=256, logging_steps=max(1, steps // 10), save_strategy="no", report_to="none",
        ),
        train_dataset=Dataset.from_dict(columns),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=lora,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    print(f"the adapter is in {out}; ktft.load_adapter(model, {str(out)!r}) loads it")


if __name__ == "__main__":
    typer.run(main)
