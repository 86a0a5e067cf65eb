"""Stage 7: what the model writes, before and after LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ktft


def complete(
    model_folder: Path, adapter: Path, records: list[dict[str, str]], max_new_tokens: int
) -> list[dict[str, str]]:
    """Greedy answers to alpaca records: the input, its real answer, and the model's `before` and `after`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(
        model_folder, quantization_config=ktft.KtftConfig(), dtype="float32"
    )
    model = ktft.load_adapter(model, adapter)

    def answer(record: dict[str, str]) -> str:
        message = {"role": "user", "content": f"{record['instruction']}\n{record['input']}"}
        inputs = tokenizer.apply_chat_template(
            [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()

    samples = []
    for record in records:
        with model.disable_adapter():
            before = answer(record)
        samples.append(
            {"input": record["input"], "reference": record["output"], "before": before, "after": answer(record)}
        )
    return samples
