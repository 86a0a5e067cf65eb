"""What a request's body asks for: the model's name, and the mistakes that engines let through."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ktft.serve.front.asgi import Refusal

CHAT = ("/v1/chat/completions", "/v1/chat/completions/render")
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

MAX_ANSWERS = 2048
"""The most answers that one request may ask for: its prompts times the answers to each."""

_WHOLE, _REAL = TypeAdapter(int), TypeAdapter(float)
_INT32 = (1 << 31) - 1


@dataclass(frozen=True)
class Limit:
    """A range with both its ends. `kind` reads a number as engines do, to which text, true and 2.0 are numbers, too."""

    kind: TypeAdapter[Any]
    low: float
    high: float

    def read(self, name: str, value: Any) -> float:
        """The number that the engine would read from a value of JSON. Raises Refusal if it is none, or out of range."""
        bounds = f"from {self.low} to {self.high}"
        kind = "a whole number" if self.kind is _WHOLE else "a number"
        try:
            number: float = self.kind.validate_python(value)
        except ValidationError:
            raise Refusal(400, f"{name} is {_shown(value)}; give {kind}, {bounds}", param=name) from None
        if not self.low <= number <= self.high:  # NaN is refused, too
            raise Refusal(400, f"{name} is {_shown(value)}; it goes {bounds}", param=name)
        return number


_CHOICES = Limit(_WHOLE, 1, 128)  # OpenAI's own limit
LIMITS = {
    "n": _CHOICES,
    "best_of": _CHOICES,
    "temperature": Limit(_REAL, 0, 2),
    "top_k": Limit(_WHOLE, -1, _INT32),  # vLLM answers 500 to numbers beyond 64 bits
    "stream_interval": Limit(_WHOLE, 1, _INT32),
}
"""Numbers of a body, or of its `sampling_params`, that engines do not limit, or limit far higher."""


def check_request(path: str, request: dict[str, Any], *, must_name: bool) -> str | None:
    """Refuse the mistakes that an engine would let through; the engine checks the rest.

    Args:
        path, request: of the request, and its body.
        must_name: whether it has to name the model.

    Returns:
        The model's name that the request gives; None if it gives none.

    Raises:
        Refusal: 400, the message says what is wrong.
    """
    name = request.get("model")
    if name is None and must_name:
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
        raise Refusal(
            400, f"{prompts} prompts with {choices} answers each; a request may have {MAX_ANSWERS} in all: send several"
        )


def _prompts(request: Mapping[str, Any]) -> Iterator[int]:
    """The number of prompts in each field of a body that can hold several."""
    for key in ("prompt", "prompt_embeds", "items", "questions", "messages"):
        value = request.get(key)
        if key == "messages":  # these are one conversation, or a list of conversations
            value = value if isinstance(value, list) and value and isinstance(value[0], list) else None
        elif isinstance(value, list) and all(isinstance(each, int | float) for each in value):
            value = None  # these are the tokens of one prompt
        if isinstance(value, list | dict):
            yield len(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}..."


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str):
        return  # the engine says what is wrong
    if role not in CHAT_ROLES:
        raise Refusal(400, f"{where}.role is {role!r}; give one of {', '.join(CHAT_ROLES)}", param="messages")
    if message.get("content") is None and role != "assistant":
        raise Refusal(400, f"{where} has no content", param="messages")
