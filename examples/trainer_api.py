"""LoRA on int8 experts with transformers' Trainer API, without LLaMA-Factory.

    python examples/trainer_api.py --model build/demo/model --data build/demo/data     (both made by `make demo`)

Trains, prints the loss, saves the adapter, loads it into a second copy of the model, and checks that it says the same.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import peft
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, TrainingArguments

import ktft


def load_base(folder: Path) -> Any:
    """The model with its routed experts in CPU memory as int8; the rest is an ordinary transformers model."""
    config = ktft.KtftConfig(expert_format="int8")
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype="float32")


def encode(tokenizer: Any, record: dict[str, str], max_length: int = 256) -> dict[str, list[int]]:
    """Token ids of one alpaca record; -100 in `labels` keeps the prompt out of the loss."""
    user = {"role": "user", "content": f"{record['instruction']}\n{record['input']}"}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer_ids = tokenizer(record["output"] + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
    labels = [-100] * len(prompt_ids) + answer_ids
    return {"input_ids": (prompt_ids + answer_ids)[:max_length], "labels": labels[:max_length]}


@torch.no_grad()
def loss_on(model: Any, batch: dict[str, torch.Tensor]) -> float:
    """Loss of one batch, without dropout."""
    return model.eval()(**batch).loss.item()


def main(
    model: Annotated[Path, typer.Option(help="Checkpoint folder of a supported MoE.")],
    data: Annotated[Path, typer.Option(help="Folder with functions.json, in alpaca format.")],
    out: Annotated[Path, typer.Option(help="Folder for the adapter.")] = Path("build/trainer_api"),
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 50,
) -> None:
    """Train, save, reload, compare."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    records = json.loads((data / "functions.json").read_text(encoding="utf-8"))
    dataset: Any = [encode(tokenizer, record) for record in records[: steps * 8]]
    collator = DataCollatorForSeq2Seq(tokenizer)

    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trained = ktft.get_peft_model(load_base(model), lora)
    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=8,
        learning_rate=5e-4,
        max_steps=steps,
        logging_steps=max(1, steps // 10),
        save_strategy="no",
        report_to="none",
    )
    trainer = ktft.Trainer(model=trained, args=arguments, train_dataset=dataset, data_collator=collator)
    trainer.train()
    trained.save_pretrained(str(out))

    batch = collator(dataset[:8]).to(trained.device)
    expected = loss_on(trained, batch)
    reloaded = ktft.load_adapter(load_base(model).to(trained.device), out)
    found = loss_on(reloaded, batch)
    print(f"loss {expected:.5f} in training, {found:.5f} reloaded from {out}")
    if not abs(found - expected) <= 1e-3:
        raise SystemExit("FAILED: the reloaded adapter does not reproduce the loss")


if __name__ == "__main__":
    typer.run(main)
