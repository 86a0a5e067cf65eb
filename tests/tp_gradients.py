"""The gradients of one batch of an adapter, on one process or on tensor parallel ranks: `GRADIENTS.pt`, by name, whole.

usage: tp_gradients.py BASE ADAPTER TP_SIZE GRADIENTS.pt. A base without an adapter gets one of random values, saved.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from adapted import lora_config, randomize
from runs import DATA, adapted
from transformers import AutoModelForCausalLM

import ktft
from ktft.adapters.tensor_parallel import shards_of
from ktft.model.experts import ranks_of
from ktft.train.parallel import split_parameters
from ktft.train.shards import held_rows


def load(base: str, adapter: str, tp_size: int) -> Any:
    if not Path(adapter).exists():
        randomize(adapted(Path(base), r=2)).save_pretrained(adapter)
    options: dict[str, Any] = {}
    if tp_size > 1:
        from transformers.distributed import DistributedConfig

        options["distributed_config"] = DistributedConfig(tp_size=tp_size)
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=ktft.KtftConfig(expert_format="bf16", threads=1), dtype=torch.float32, **options
    )
    return ktft.load_adapter(model, adapter, is_trainable=True)


def main(base: str, adapter: str, tp_size: str, output: str) -> None:
    model = load(base, adapter, int(tp_size))
    ids = torch.stack([example["input_ids"] for example in DATA[:4]])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    together, shards, split, held = ranks_of(model), shards_of(model), split_parameters(model), held_rows(model)
    found: dict[str, Any] = {"loss": loss.detach(), "apart": {}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or parameter.grad is None:
            continue
        grad = parameter.grad
        if name in split and together is not None:
            whole = grad.new_empty(held[name].num_experts, *grad.shape[1:])
            for numbers, part in together.gather((held[name].numbers, grad)):
                whole[list(numbers)] = part
            grad = whole
        elif name in shards:
            grad = shards[name].gather(grad)
        elif together is not None:
            copies = together.gather(grad)
            found["apart"][name] = max(float((copy - grad).abs().max()) for copy in copies)
        found[name] = grad
    if together is None or together.first:
        torch.save(found, output)


if __name__ == "__main__":
    main(*sys.argv[1:])
    _ = lora_config
