"""Measures the effect of expert deferral on a model: its logits on given tokens with and without deferral.

`ktft serve --deferral N` adds a token's N experts with the smallest weights one MoE layer later, in decode, except in
the last layer. Here this is done at all positions, also in prompts: a bound for the effect on decode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ktft.config import Settings
from ktft.deferral import lowest
from ktft.verify.contract import relative_error
from ktft.verify.whole import divergence, load_model, logits_of, outermost_experts, prompt_tokens, random_tokens


@dataclass(frozen=True)
class DeferralEffect:
    """The effect of deferring `deferred` of `top_k` experts, over `tokens` positions.

    Attributes:
        logits: relative L2 change of the logits.
        kl: mean Kullback-Leibler divergence of the next token's distribution from that without deferral, in nats.
        top1: share of positions with the same likeliest token.
        perplexity, deferred_perplexity: the perplexity of the tokens without and with deferral.
    """

    deferred: int
    top_k: int
    tokens: int
    logits: float
    kl: float
    top1: float
    perplexity: float
    deferred_perplexity: float


def verify_deferral(
    directory: Path, settings: Settings, deferral: int, tokens: int, prompts: Path | None, adapter: Path | None
) -> DeferralEffect:
    """Load a model, and measure.

    Args:
        directory, settings, adapter: see `ktft.verify.whole.verify_whole`.
        deferral: the number of a token's experts to defer.
        tokens: the length of the random sequence that is used without prompts, and the most tokens of a prompt.
        prompts: a text file with one prompt per line.

    Raises:
        OSError, ValueError: the checkpoint, the adapter, the prompts or `deferral` cannot be used.
    """
    model = load_model(directory, settings, adapter)
    sequences = [random_tokens(model, tokens)] if prompts is None else prompt_tokens(directory, prompts, tokens)
    return deferral_effect(model, sequences, deferral)


@torch.no_grad()
def deferral_effect(model: Any, sequences: Sequence[Tensor], deferral: int) -> DeferralEffect:
    """The effect of deferral on a model with ktft's experts, measured on `[1, n]` token sequences.

    Raises:
        ValueError: fewer than one expert deferred, or fewer than one on time.
    """
    plain = [logits_of(model, ids)[0] for ids in sequences]
    with deferred(model, deferral) as top_k:
        late = [logits_of(model, ids)[0] for ids in sequences]
    kl, top1 = divergence(torch.cat(late), torch.cat(plain))
    return DeferralEffect(
        deferred=deferral,
        top_k=top_k[0],
        tokens=sum(map(len, plain)),
        logits=relative_error(torch.cat(late), torch.cat(plain)),
        kl=kl,
        top1=top1,
        perplexity=_perplexity(plain, sequences),
        deferred_perplexity=_perplexity(late, sequences),
    )


@contextmanager
def deferred(model: Any, count: int) -> Iterator[list[int]]:
    """Defer the model's experts within the block. A forward puts the model's number of experts per token in the list.

    Raises:
        ValueError: a forward raises it if `count` is not from 1 to one less than the experts of a token.
    """
    modules = [module for _, module in sorted(outermost_experts(model).items())]
    top_k: list[int] = []
    owed: list[Tensor] = []

    def late(module: Any, forward: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if not 1 <= count < index.shape[1]:
            raise ValueError(
                f"deferral is {count}; this model's tokens have {index.shape[1]} experts, of which one at least must "
                f"be on time: give 1 to {index.shape[1] - 1}"
            )
        top_k[:] = [index.shape[1]]
        due = [] if module is modules[0] else [owed.pop()]
        light = lowest(weights, count) if module is not modules[-1] else torch.zeros_like(weights, dtype=torch.bool)
        out: Tensor = forward(hidden, index, weights.masked_fill(light, 0))
        if module is not modules[-1]:
            owed[:] = [forward(hidden, index, weights.masked_fill(~light, 0))]
        return sum(due, out)

    def patched(module: Any) -> Any:
        forward = module.forward
        return lambda hidden, index, weights: late(module, forward, hidden, index, weights)

    for module in modules:
        module.forward = patched(module)
    try:
        yield top_k
    finally:
        for module in modules:
            del module.forward


def _perplexity(logits: Sequence[Tensor], sequences: Sequence[Tensor]) -> float:
    pairs = list(zip(logits, sequences, strict=True))
    losses = [F.cross_entropy(each[:-1], ids[0, 1:], reduction="none") for each, ids in pairs]
    return float(torch.cat(losses).mean().exp())
