"""Prompts whose greedy token is clear: what a right server must answer, by transformers alone.

Rounding in another batch may tip a near tie between two experts of any token, and with it the answer. An answer is
clear if it stays the same while hidden states are moved by more than rounding moves them.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from merging import merged_by_hand, stock
from torch import Tensor
from transformers import AutoTokenizer

BASE = "base"
CANDIDATES, WANTED = 200, 12

MARGIN = 0.2
"""Nats between the greedy token and the next, at least."""
MOVED, TIMES = 0.02, 15
"""How far hidden states are moved, relative to each value and in standard deviations, and how many times."""


@dataclass(frozen=True)
class Prompt:
    """A request's content, and the first greedy token of the answer of each model that chooses it clearly."""

    path: str
    content: dict[str, Any]
    first: dict[str, int]


def clear_prompts(base: Path, adapters: dict[str, Path], seed: int) -> list[Prompt]:
    """Prompts of which each model that has a clear answer has another one. Call it before a server takes the cores.

    Raises:
        RuntimeError: there are too few for a model.
    """
    torch.set_num_threads(min(4, torch.get_num_threads()))  # more only slow such small products down
    drawn = random.Random(seed)
    candidates = [_candidate(number, drawn) for number in range(CANDIDATES)]
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = [_token_ids(tokenizer, content) for _, content in candidates]
    first: list[dict[str, int]] = [{} for _ in candidates]
    for name in (BASE, *adapters):
        for known, token in zip(first, clear_answers(base, adapters.get(name), ids), strict=True):
            if token is not None:
                known[name] = token
    prompts = [
        Prompt(path, content, known)
        for (path, content), known in zip(candidates, first, strict=True)
        if len(known) == len(set(known.values())) >= 2
    ]
    for model in (BASE, *adapters):
        kinds = Counter(prompt.path for prompt in prompts if model in prompt.first)
        print(f"prompts that tell {model} from others: {dict(kinds)}", flush=True)
        if kinds.total() < WANTED:
            raise RuntimeError("too few prompts tell the models apart: make the adapters larger")
    return prompts


def _candidate(number: int, drawn: random.Random) -> tuple[str, dict[str, Any]]:
    length = drawn.choice((3, 10, 40, 200))
    if number % 2:
        text = "".join(drawn.choices("abcdefghijklmnopqrstuvwxyz ,.", k=length))
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", {"prompt": [drawn.randrange(3, 259) for _ in range(length)]}


def _token_ids(tokenizer: Any, content: dict[str, Any]) -> list[int]:
    """What the server makes of a request's content."""
    if "prompt" in content:
        return list(content["prompt"])
    return list(tokenizer.apply_chat_template(content["messages"], add_generation_prompt=True, return_dict=False))


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
