"""Compares a server's log-probabilities with those of training's model, which is the base, or base and adapter.

The limit is measured: how far training's model moves if everything around its experts is computed in bf16, as a server
does, instead of fp32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from ktft.config import Settings
from ktft.verify.client import Continuation, ServerClient
from ktft.verify.whole import load_model

NOISE = 6.0
"""How many times further off than bf16 a server may be, on average and at the worst token. Its kernels round more often
than transformers': up to 5 times were seen, and a token moves far where rounding changes the choice of an expert."""
ATTENTIONS = ("sdpa", "eager")
"""The implementations of attention with which bf16 is tried; each rounds in other places."""
PROMPTS = (
    "The lighthouse keeper counted the ships as they came in, one by one, and wrote each name into a book.",
    "def median(values):\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n    return",
    "Question: A train leaves at 14:35 and arrives at 17:10. How long is the journey?\nAnswer:",
    "Water boils at a lower temperature in the mountains because",
    "SELECT name, COUNT(*) AS orders FROM customers JOIN orders ON customers.id = orders.customer WHERE",
    "Der alte Kapitän sah lange auf das Meer hinaus, bevor er antwortete:",
    "La bibliothèque ferme à dix-huit heures, sauf le jeudi, où",
    "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    '{"city": "Lisbon", "country": "Portugal", "population": 545796, "languages": [',
    "Dear Ms. Novak,\n\nThank you for your letter of 3 March. We are sorry to hear that",
    "To sharpen a kitchen knife, first soak the stone, then hold the blade at an angle of",
    "今天天气很好,我们决定去公园散步。路上",
)
"""Short texts that are in no training set of this project."""


@dataclass(frozen=True)
class ServedDistance:
    """The distance between two lists of log-probabilities of the same tokens, in nats."""

    mean: float
    largest: float


@dataclass(frozen=True)
class Difference:
    """A token of a continuation that training's model would not have chosen.

    Attributes:
        prompt, position: number of the prompt, and of the token within its continuation, from 0.
        served, expected: token ids.
        gap: by how much training's model finds its own token likelier, in nats.
    """

    prompt: int
    position: int
    served: int
    expected: int
    gap: float


@dataclass(frozen=True)
class ParityResult:
    """The result of a comparison.

    Attributes:
        model: the name that was asked for.
        served: the distance of the server from training's model, with the adapter if one was named.
        noise: the distance of training's model with everything around the experts in bf16 from the same in fp32; the
            largest of `ATTENTIONS`.
        base: the distance of the server from the base model alone; None without an adapter.
        effect: the distance of training's model with the adapter from the base model alone; None without an adapter.
        applied: the share of that effect that the server shows: about 1, or about 0 if the server has no adapter.
        tokens, continued: how many tokens of prompts and of continuations were compared.
        ties: differing tokens that are equally likely, to within the limit of a single token, so that rounding decides.
        limit, largest_limit: the limits of `served`.
        problems: what is wrong, one message each.
    """

    model: str
    served: ServedDistance
    noise: ServedDistance
    base: ServedDistance | None
    effect: ServedDistance | None
    applied: float | None
    tokens: int
    continued: int
    ties: list[Difference]
    limit: float
    largest_limit: float
    problems: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The result in a few words."""
        if self.base is None:
            return "off" if self.problems else "the same model"
        if not self.problems:
            return "adapter applied"
        return "adapter NOT applied" if self.base.mean <= self.limit else "off"

    def to_dict(self) -> dict[str, Any]:
        """The result as values of JSON."""
        return {"passed": not self.problems, "verdict": self.verdict} | asdict(self)


@dataclass(frozen=True)
class _Scores:
    """One model's log-probabilities of the tokens of all texts, and the continuations that it would have chosen.

    Attributes:
        logprobs: `[tokens]`, text after text.
        choices: for each text, the chosen token and its log-probability at each place of the continuation.
    """

    logprobs: Tensor
    choices: list[list[tuple[int, float]]]

    def distance(self, other: Tensor) -> ServedDistance:
        difference = (self.logprobs - other).abs()
        return ServedDistance(float(difference.mean()), float(difference.max()))


def read_prompts(file: Path | None) -> list[str]:
    """The prompts of a file, one a line, or `PROMPTS` without a file. A line in quotation marks is a JSON string.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is no JSON string, or the file is empty.
    """
    if file is None:
        return list(PROMPTS)
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = [json.loads(line) if line.startswith('"') else line for line in lines]
    if not prompts:
        raise ValueError(f"{file} has no prompts; write one a line, as text or as a JSON string in quotation marks")
    return prompts


def verify_server(
    server: ServerClient,
    directory: Path,
    settings: Settings,
    adapter: Path | None,
    prompts: Sequence[str],
    tokens: int,
) -> Iterator[str | ParityResult]:
    """Compare a server with training's model. Yields what is done next, and the result at the end.

    Args:
        directory, settings: the base model and how its experts are held.
        adapter: the adapter that the server should apply; None for none.
        tokens: length of each greedy continuation.

    Raises:
        ServerError: as `Server.continue_all`.
        ValueError: the checkpoint or adapter is damaged or does not fit; a prompt has fewer than two tokens.
    """
    yield f"{len(prompts)} prompts to {server.url}"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
    for prompt, each in zip(prompts, ids, strict=True):
        if len(each) < 2:
            raise ValueError(f"the prompt {prompt!r} has {len(each)} tokens; a prompt needs two")
    answers = server.continue_all(ids, tokens)
    yield "loading training's model"
    model = load_model(directory, settings, adapter)
    yield "training's model in fp32"
    expected = _score(model, answers)
    alone = None
    if adapter is not None:
        yield "the same without the adapter"
        with model.disable_adapter():
            alone = _score(model, answers)
    model.to(torch.bfloat16)
    noises = []
    for attention in ATTENTIONS:
        yield f"training's model in bf16, attention {attention}"
        model.set_attn_implementation(attention)
        noises.append(expected.distance(_score(model, answers).logprobs))
    noise = ServedDistance(max(each.mean for each in noises), max(each.largest for each in noises))
    yield _judge(server, answers, expected, alone, noise)


@torch.no_grad()
def _score(model: Any, answers: Sequence[Continuation]) -> _Scores:
    found, choices = [], []
    for answer in answers:
        ids = torch.tensor([answer.prompt + answer.tokens])
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, 1:, None])[:, 0])
        best = logprobs[len(answer.prompt) - 1 :].max(-1)
        choices.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
    return _Scores(torch.cat(found), choices)


def _judge(
    server: ServerClient,
    answers: Sequence[Continuation],
    expected: _Scores,
    alone: _Scores | None,
    noise: ServedDistance,
) -> ParityResult:
    told = torch.tensor([value for answer in answers for value in (*answer.prompt_logprobs, *answer.logprobs)])
    served = expected.distance(told)
    limit, largest = NOISE * noise.mean, NOISE * noise.largest
    differences = list(_differences(answers, expected))
    base = effect = applied = None
    if alone is not None:
        base, effect = alone.distance(told), expected.distance(alone.logprobs)
        moved = expected.logprobs - alone.logprobs
        applied = float((told - alone.logprobs) @ moved / (moved @ moved)) if effect.mean else math.nan
    result = ParityResult(
        model=server.model,
        served=served,
        noise=noise,
        base=base,
        effect=effect,
        applied=applied,
        tokens=sum(len(answer.prompt_logprobs) for answer in answers),
        continued=sum(len(answer.tokens) for answer in answers),
        ties=[each for each in differences if each.gap <= largest],
        limit=limit,
        largest_limit=largest,
    )
    result.problems.extend(_problems(result, [each for each in differences if each not in result.ties]))
    return result


def _differences(answers: Sequence[Continuation], expected: _Scores) -> Iterator[Difference]:
    begin = 0
    for number, (answer, choices) in enumerate(zip(answers, expected.choices, strict=True)):
        begin += len(answer.prompt_logprobs)
        for position, (token, (best, logprob)) in enumerate(zip(answer.tokens, choices, strict=True)):
            if token != best:
                gap = logprob - float(expected.logprobs[begin + position])
                yield Difference(number, position, token, best, gap)
        begin += len(answer.tokens)


def _problems(result: ParityResult, differences: Sequence[Difference]) -> Iterator[str]:
    effect, base, off = result.effect, result.base, result.served
    if effect is not None and effect.mean <= 2 * result.limit:
        yield (
            f"the adapter moves log-probabilities by {effect.mean:.3g} nats a token, no more than twice the limit of "
            f"{result.limit:.3g}, so it cannot be told whether it is applied; give --prompts that it was trained for"
        )
    elif base is not None and base.mean <= result.limit:
        yield (
            f"adapter NOT applied: the server is {base.mean:.3g} nats a token from the base model alone, within the "
            f"limit of {result.limit:.3g}, and {off.mean:.3g} from base and adapter"
        )
    elif not off.mean <= result.limit:
        yield (
            f"the server is {off.mean:.3g} nats a token off, the limit is {result.limit:.3g}: it serves another model, "
            "another adapter or experts in another --format"
        )
    elif not off.largest <= result.largest_limit:
        yield (
            f"one token is {off.largest:.3g} nats off, the limit of a single token is {result.largest_limit:.3g}; the "
            "mean of all is within its limit"
        )
    elif differences:
        worst = max(differences, key=lambda each: each.gap)
        yield (
            f"{len(differences)} tokens of continuations are not those that training's model would choose, and no near "
            f"ties; in prompt {worst.prompt} at {worst.position} the server chose {worst.served}, where "
            f"{worst.expected} is likelier by {worst.gap:.3g} nats"
        )
