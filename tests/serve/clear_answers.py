"""Prompts whose greedy token is clear: what a right server must answer, by transformers alone.

Rounding in another batch may tip a near tie between two experts of any token, and with it the answer. An answer is
clear if it stays the same while hidden states are moved by more than rounding moves them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from merging import merged_by_hand, stock
from torch import Tensor

MARGIN = 0.2
"""Nats between the greedy token and the next, at least."""
MOVED, TIMES = 0.01, 15
"""How far hidden states are moved, relative to each value and in standard deviations, and how many times."""


def clear_answers(base: Path, adapter: Path | None, prompts: list[list[int]]) -> list[int | None]:
    """The greedy token after each prompt, or None where it is not clear.

    The model is computed in fp32 with the adapter merged into its weights.
    """
    model: Any = (stock(base) if adapter is None else merged_by_hand(base, adapter)).eval()
    generator = torch.Generator().manual_seed(0)

    def move(_: Any, __: Any, hidden: Any) -> Any:
        hidden[1:] *= 1 + MOVED * torch.randn(hidden[1:].shape, generator=generator)
        return hidden

    for part in (model.model.embed_tokens, *model.model.layers):
        part.register_forward_hook(move)
    return [_clear(model, torch.tensor([ids])) for ids in prompts]


def _clear(model: Any, ids: Tensor) -> int | None:
    with torch.no_grad():
        logits = model(input_ids=ids.expand(1 + TIMES, -1), use_cache=False, logits_to_keep=1).logits[:, -1]
    best = logits.log_softmax(-1).topk(2)
    token = int(best.indices[0, 0])
    clear = bool((best.indices[:, 0] == token).all()) and float((best.values[:, 0] - best.values[:, 1]).min()) >= MARGIN
    return token if clear else None
