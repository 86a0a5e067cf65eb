"""Stage 6: what the model answers to held-out prompts, before and after LoRA, and how often it is right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ktft

BATCH = 16


@torch.no_grad()
def answers_of(model: Any, tokenizer: Any, records: list[dict[str, str]], max_new_tokens: int) -> list[str]:
    """A model's greedy answer to each alpaca record."""
    texts: list[str] = []
    for start in range(0, len(records), BATCH):
        messages = [
            [{"role": "user", "content": f"{record['instruction']}\n{record['input']}"}]
            for record in records[start : start + BATCH]
        ]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        texts += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def compare(
    model_folder: Path, adapter: Path, train: list[dict[str, str]], heldout: list[dict[str, str]], max_new_tokens: int
) -> dict[str, Any]:
    """Answers to held-out records without and with the adapter, and how many of them are the right sentence.

    `commonest` is how many would be right if every answer were the sentence that occurs most often in `train`.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    config = ktft.KtftConfig()  # int8 experts, as in training
    base: Any = AutoModelForCausalLM.from_pretrained(model_folder, quantization_config=config, dtype="float32")
    model = ktft.load_adapter(base, adapter)
    with model.disable_adapter():
        before = answers_of(model, tokenizer, heldout, max_new_tokens)
    after = answers_of(model, tokenizer, heldout, max_new_tokens)
    references = [record["output"] for record in heldout]
    [(commonest, _)] = Counter(record["output"] for record in train).most_common(1)

    def right(answers: list[str]) -> int:
        return sum(answer == reference for answer, reference in zip(answers, references, strict=True))

    return {
        "prompts": len(heldout),
        "right_before": right(before),
        "right_after": right(after),
        "commonest": right([commonest] * len(heldout)),
        "answers": [
            {"input": record["input"], "reference": record["output"], "before": b, "after": a}
            for record, b, a in zip(heldout, before, after, strict=True)
        ],
    }
