"""Prompts whose greedy token is clear: what a right server must answer, by transformers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from merging import merged_by_hand, stock
from torch import Tensor

MARGIN = 0.3
"""Nats between the greedy token and the next."""
TIE = 0.1
"""Between the router's value for the last expert that is chosen and the next, at the last token of a prompt. Below it
the rounding of another batch may choose the other expert, and with it another token."""


def clear_answers(base: Path, adapter: Path | None, prompts: list[list[int]]) -> list[int | None]:
    """The greedy token after each prompt, or None where rounding in bf16 might change it. The model is computed in fp32
    with the adapter merged into its weights."""
    model: Any = (stock(base) if adapter is None else merged_by_hand(base, adapter)).eval()
    return [_clear(model, torch.tensor([ids])) for ids in prompts]


def _clear(model: Any, ids: Tensor) -> int | None:
    with torch.no_grad():
        out = model(input_ids=ids, output_router_logits=True, use_cache=False)
    best = out.logits[0, -1].float().log_softmax(-1).topk(2)
    top_k = model.config.num_experts_per_tok
    ties = [float(each[top_k - 1] - each[top_k]) for each in (r[-1].sort(descending=True).values for r in out.router_logits)]
    clear = float(best.values[0] - best.values[1]) >= MARGIN and min(ties) >= TIE
    return int(best.indices[0]) if clear else None
