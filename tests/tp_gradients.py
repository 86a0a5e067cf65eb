"""The gradients of one batch of an adapter, whole, in one process or gathered from tensor parallel ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from adapted import load
from runs import DATA

import ktft
from ktft.adapters.tensor_parallel import shards_of
from ktft.model.experts import ranks_of
from ktft.train.shards import held_rows


def gradients(base: str, adapter: str, output: str, distributed: dict[str, Any] | None = None) -> None:
    """Write the loss, every gradient by name, and how far the copies of each that ranks have are apart."""
    model: Any = ktft.load_adapter(load(Path(base), distributed=distributed), adapter, is_trainable=True)
    ids = torch.stack([example["input_ids"] for example in DATA[:4]])
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    together, shards, held = ranks_of(model), shards_of(model), held_rows(model)
    apart, found = {}, {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        grad = found[name] = parameter.grad
        if together is None:
            continue
        if name in held:
            found[name] = whole = grad.new_empty(held[name].num_experts, *grad.shape[1:])
            for numbers, part in together.gather((held[name].numbers, grad)):
                whole[list(numbers)] = part
        elif name in shards:
            found[name] = shards[name].gather(grad)
        else:
            apart[name] = max(float((copy - grad).abs().max()) for copy in together.gather(grad))
    if together is None or together.first:
        torch.save({"loss": loss.detach(), "apart": apart, "gradients": found}, output)
