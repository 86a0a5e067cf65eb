"""Stage 6: what the model answers to held-out prompts, before and after LoRA, and how often it is right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ktft

BATCH = 16


class Writer:
    """A model with an adapter that may be switched off, and its greedy answers."""

    def __init__(self, model_folder: Path, adapter: Path, max_new_tokens: int) -> None:
        """Loads the model with its experts in int8, as they were in training."""
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_folder, quantization_config=ktft.KtftConfig(), dtype="float32"
        )
        self.model = ktft.load_adapter(model, adapter)
        self.max_new_tokens = max_new_tokens

    @torch.no_grad()
    def answers(self, records: list[dict[str, str]]) -> list[str]:
        """One answer for each alpaca record."""
        texts: list[str] = []
        for start in range(0, len(records), BATCH):
            messages = [
                [{"role": "user", "content": f"{record['instruction']}\n{record['input']}"}]
                for record in records[start : start + BATCH]
            ]
            inputs = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
            )
            output = self.model.generate(**inputs, max_new_tokens=self.max_new_tokens, do_sample=False)
            texts += self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [text.strip() for text in texts]


def compare(
    model_folder: Path, adapter: Path, train: list[dict[str, str]], heldout: list[dict[str, str]], max_new_tokens: int
) -> dict[str, Any]:
    """Answers to held-out records without and with the adapter, and how many of them are the right sentence.

    `commonest` is how many would be right if every answer were the sentence that occurs most often in `train`.
    """
    writer = Writer(model_folder, adapter, max_new_tokens)
    with writer.model.disable_adapter():
        before = writer.answers(heldout)
    after = writer.answers(heldout)
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
