"""LoRA with tensor parallel attention, by transformers' Trainer: each GPU has a part of attention and experts.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py --model build/demo/model --data build/demo/data

For replicas beside it start a multiple of --tp-size processes, such as 8 with --tp-size 4 for two. Needs transformers
5.23, peft 0.21.2 and accelerate 1.15. The saved adapter is a standard one, which one process loads.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import peft
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, TrainingArguments
from transformers.distributed import DistributedConfig

import ktft


def encode(tokenizer: Any, record: dict[str, str], max_length: int = 256) -> dict[str, list[int]]:
    """Token ids of one alpaca record; -100 in `labels` keeps the prompt out of the loss."""
    user = {"role": "user", "content": f"{record['instruction']}\n{record['input']}"}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(record["output"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    labels = [-100] * len(prompt_ids) + answer_ids
    return {"input_ids": (prompt_ids + answer_ids)[:max_length], "labels": labels[:max_length]}


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder of a supported MoE.")],
    data: Annotated[Path, typer.Option(help="Folder with functions.json, in alpaca format.")],
    out: Annotated[Path, typer.Option(help="Folder for the adapter.")] = Path("build/tensor_parallel"),
    tp_size: Annotated[int, typer.Option(help="Processes that share one batch.")] = 2,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 50,
) -> None:
    """Train and save."""
    replicas = int(os.environ.get("WORLD_SIZE", "1")) // tp_size
    # ktft shares the experts among all processes; transformers divides what is around them.
    base = AutoModelForCausalLM.from_pretrained(
        model,
        quantization_config=ktft.KtftConfig(expert_format="int8"),
        distributed_config=DistributedConfig(tp_size=tp_size, dp_replicate_size=replicas),
        dtype="bfloat16" if torch.cuda.is_available() else "float32",
    )
    torch.manual_seed(0)  # every process must begin with the same LoRA
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = ktft.get_peft_model(base, lora)

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    records = json.loads((data / "functions.json").read_text(encoding="utf-8"))
    dataset: Any = [encode(tokenizer, record) for record in records[: steps * 8]]
    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=8,  # of each replica, whatever the number of its processes
        learning_rate=5e-4,
        max_steps=steps,
        logging_steps=max(1, steps // 10),
        bf16=torch.cuda.is_available(),
        report_to="none",
    )
    trainer = ktft.Trainer(trained, arguments, train_dataset=dataset, data_collator=DataCollatorForSeq2Seq(tokenizer))
    trainer.train(resume_from_checkpoint=any(out.glob("checkpoint-*")))
    trainer.save_model()


if __name__ == "__main__":
    typer.run(main)
