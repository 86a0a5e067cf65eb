"""Requests that a server must refuse with a 4xx and a message, one row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class BadRequest:
    """A request.

    Attributes:
        name: what is wrong.
        path, method: where it goes.
        body: JSON fields beside the model's name, which wins over it; None sends `text`.
        text: a raw body.
        long: the prompt is made longer than the model's context.
        without: fields to leave out, the model's name among them.
    """

    name: str
    path: str = COMPLETIONS
    body: Any = None
    text: str | None = None
    method: str = "POST"
    long: bool = False
    without: tuple[str, ...] = ()

    def request(self, model: str, context: int) -> dict[str, Any]:
        """Arguments of httpx's `request`.

        Args:
            model: the name that is served.
            context: the most tokens of a prompt and its answer.
        """
        place = {"method": self.method, "url": self.path}
        if self.text is not None:
            return place | {"content": self.text, "headers": {"content-type": "application/json"}}
        if self.method == "GET":
            return place
        content = {"model": model, "max_tokens": 4} | self.body
        if self.long:
            content["prompt"] = [7] * (context + 1)
        return place | {"json": {key: value for key, value in content.items() if key not in self.without}}


def _values(field: str, *values: Any, path: str = COMPLETIONS) -> list[BadRequest]:
    content: dict[str, Any] = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    return [BadRequest(f"{field}={value!r} at {path}", path, content | {field: value}) for value in values]


BAD_REQUESTS: tuple[BadRequest, ...] = (
    BadRequest("malformed JSON", CHAT, text='{"model": "base", "messages": [{'),
    BadRequest("malformed JSON", COMPLETIONS, text="not json at all"),
    BadRequest("an empty body", COMPLETIONS, text=""),
    BadRequest("a JSON list", COMPLETIONS, text="[1, 2, 3]"),
    BadRequest("no messages", CHAT, {}),
    BadRequest("empty messages", CHAT, {"messages": []}),
    BadRequest("messages as a string", CHAT, {"messages": "hi"}),
    BadRequest("a message without a role", CHAT, {"messages": [{"content": "hi"}]}),
    BadRequest("an unknown role", CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}),
    BadRequest("content of a wrong type", CHAT, {"messages": [{"role": "user", "content": 5}]}),
    BadRequest("no prompt", COMPLETIONS, {}),
    BadRequest("an empty prompt", COMPLETIONS, {"prompt": []}),
    BadRequest("a prompt of a wrong type", COMPLETIONS, {"prompt": {"text": "hi"}}),
    BadRequest("a token out of the vocabulary", COMPLETIONS, {"prompt": [5, 10**6]}),
    BadRequest("a negative token", COMPLETIONS, {"prompt": [5, -3]}),
    BadRequest("a prompt longer than the context", COMPLETIONS, {}, long=True),
    BadRequest("a conversation longer than the context", CHAT, {"messages": [{"role": "user", "content": "x" * 9000}]}),
    BadRequest("an unknown model", COMPLETIONS, {"model": "nobody", "prompt": "hi"}),
    BadRequest("an unknown model", CHAT, {"model": "nobody", "messages": HI}),
    BadRequest("a model of a wrong type", CHAT, {"model": 7, "messages": HI}),
    BadRequest("no model", COMPLETIONS, {"prompt": "hi"}, without=("model",)),
    BadRequest("no model", CHAT, {"messages": HI}, without=("model",)),
    *_values("max_tokens", -5, 0, "many", 10**9),
    *_values("max_tokens", -5, "many", path=CHAT),
    *_values("temperature", -1, 99, "hot"),
    *_values("temperature", -1, 99, path=CHAT),
    *_values("top_p", 2, -0.5, path=CHAT),
    *_values("n", 0, -1, 10**6),
    *_values("logprobs", -5, 10**6),
    *_values("top_logprobs", 10**6, path=CHAT),
    *_values("prompt_logprobs", -7),
    *_values("stop", 5, path=CHAT),
    *_values("presence_penalty", 99),
    *_values("seed", "lucky"),
    *_values("stream", "perhaps"),
    *_values("response_format", {"type": "poem"}, path=CHAT),
    *_values("tools", "hammer", path=CHAT),
    BadRequest("an adapter that is not there", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}),
    BadRequest("an adapter without a path", "/v1/load_lora_adapter", {"lora_name": "x"}),
    BadRequest("an adapter that is not loaded", "/v1/unload_lora_adapter", {"lora_name": "nobody"}),
    BadRequest("a path that does not exist", "/v1/nothing", {"prompt": "hi"}),
    BadRequest("a wrong method", COMPLETIONS, method="GET"),
)
