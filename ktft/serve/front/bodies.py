"""What a request's body asks for: which paths compute, and what is wrong with it that vLLM would let through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ktft.serve.front.requests import Refusal

CHAT = ("/v1/chat/completions", "/v1/chat/completions/render")
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
COMPUTES = {
    **dict.fromkeys(CHAT, True),
    "/v1/completions": True,
    "/v1/completions/render": True,
    "/v1/responses": True,
    "/v1/responses/render": True,
    "/v1/messages": True,
    "/v1/messages/render": True,
    "/v1/messages/count_tokens": True,
    "/v1/chat/completions/batch": True,
    "/v1/systemone": True,
    "/generative_scoring": True,
    "/inference/v1/generate": True,
    "/invocations": True,
    "/tokenize": False,
    "/detokenize": False,
}
"""Paths that take a request for a model, in any tested vLLM, and whether it has to name the model."""

MAX_ANSWERS = 2048
"""Of one request: its prompts, times the answers to each."""

_WHOLE, _REAL = TypeAdapter(int), TypeAdapter(float)
_INT32 = (1 << 31) - 1


@dataclass(frozen=True)
class Limit:
    """From where to where a number goes. `kind` reads it as the engine does: text, true and 2.0 are numbers, too."""

    kind: TypeAdapter[Any]
    low: float
    high: float

    def read(self, name: str, value: Any) -> float:
        """The number that the engine would take.

        Raises:
            Refusal: 400, it is none, or is outside.
        """
        kind = "a whole number" if self.kind is _WHOLE else "a number"
        try:
            number: float = self.kind.validate_python(value)
        except ValidationError:
            raise Refusal(400, f"{name} is {_shown(value)}; give {kind}, {self}", param=name) from None
        if not self.low <= number <= self.high:  # NaN is not either
            raise Refusal(400, f"{name} is {_shown(value)}; it goes {self}", param=name)
        return number

    def __str__(self) -> str:
        return f"from {self.low} to {self.high}"


_CHOICES = Limit(_WHOLE, 1, 128)  # OpenAI's own limit
LIMITS = {
    "n": _CHOICES,
    "best_of": _CHOICES,
    "temperature": Limit(_REAL, 0, 2),
    "top_k": Limit(_WHOLE, -1, _INT32),  # beyond 64 bits vLLM answers 500
    "stream_interval": Limit(_WHOLE, 1, _INT32),
}
"""Numbers of a body, or of the `sampling_params` in it, for which vLLM has no limit, or a far larger one."""


def check_request(path: str, request: dict[str, Any]) -> str | None:
    """The model's name that a request gives, None where it may leave it out and does.

    vLLM checks the rest; here is what it lets through.

    Raises:
        Refusal: what is wrong.
    """
    name = request.get("model")
    if name is None and COMPUTES[path]:
        raise Refusal(400, "model is missing; GET /v1/models has the name that is served", param="model")
    if name is not None and (not isinstance(name, str) or not name):
        raise Refusal(400, f"model is {name!r}; give a name", param="model")
    if request.get("background"):
        raise Refusal(400, "background responses are not supported: leave background out", param="background")
    _check_answers(request)
    messages = request.get("messages")
    if path in CHAT and isinstance(messages, list):
        for number, message in enumerate(messages):
            _check_message(f"messages[{number}]", message)
    return name


def _check_answers(request: Mapping[str, Any]) -> None:
    choices = 1
    for prefix, fields in (("", request), ("sampling_params.", request.get("sampling_params"))):
        if not isinstance(fields, dict):
            continue
        given = [key for key in LIMITS if fields.get(key) is not None]
        numbers = {key: LIMITS[key].read(prefix + key, fields[key]) for key in given}
        choices = max(choices, *(int(numbers.get(key, 1)) for key in ("n", "best_of")))
    prompts = sum(_prompts(request))
    if prompts * choices > MAX_ANSWERS:
        raise Refusal(400, f"{prompts} prompts with {choices} answers each; a request may have {MAX_ANSWERS} in all")


def _prompts(request: Mapping[str, Any]) -> Iterator[int]:
    """How many each field of a body has that can hold several."""
    for key in ("prompt", "prompt_embeds", "items", "questions", "messages"):
        value = request.get(key)
        if key == "messages":  # one conversation, or a list of them
            value = value if isinstance(value, list) and value and isinstance(value[0], list) else None
        elif isinstance(value, list) and all(isinstance(each, int | float) for each in value):
            value = None  # the tokens of one
        if isinstance(value, list | dict):
            yield len(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}..."


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        return  # vLLM says what is wrong
    if role not in CHAT_ROLES:
        raise Refusal(400, f"{where}.role is {role!r}; give one of {', '.join(CHAT_ROLES)}", param="messages")
    if message.get("content") is None and role != "assistant":
        raise Refusal(400, f"{where} has no content", param="messages")
