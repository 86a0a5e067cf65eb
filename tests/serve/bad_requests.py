"""Requests that a server must refuse with a 4xx and a message, one row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
NO_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
TOOL = {"type": "function", "function": {"name": "answer", "parameters": {"type": "object"}}}
OTHER_TOOL = {"type": "function", "function": {"name": "other"}}


@dataclass(frozen=True)
class BadRequest:
    """A request that must be refused.

    Attributes:
        name: what is wrong.
        path, method: where it is sent.
        body: JSON fields besides the model's name, which they may replace; None sends `text`.
        text: a raw body. MODEL in it stands for the model's name.
        long: make the prompt longer than the model's context.
        without: fields to leave out, the model's name among them.
    """

    name: str
    path: str = COMPLETIONS
    body: Any = None
    text: str | bytes | None = None
    method: str = "POST"
    long: bool = False
    without: tuple[str, ...] = ()

    def request(self, model: str, context: int) -> dict[str, Any]:
        """Arguments of httpx's `request`.

        Args:
            model: the name of the served model.
            context: how many tokens a prompt and its answer may have.
        """
        place = {"method": self.method, "url": self.path}
        if self.text is not None:
            text = self.text.replace("MODEL", model) if isinstance(self.text, str) else self.text
            return place | {"content": text, "headers": {"content-type": "application/json"}}
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
    BadRequest("malformed JSON", CHAT, text='{"model": "MODEL", "messages": [{'),
    BadRequest("malformed JSON", COMPLETIONS, text="not json at all"),
    BadRequest("an empty body", COMPLETIONS, text=""),
    BadRequest("a JSON list", COMPLETIONS, text="[1, 2, 3]"),
    BadRequest("no UTF-8", CHAT, text=b"\xff\xff"),
    BadRequest("no number", CHAT, text='{"model": "MODEL", "temperature": NaN}'),
    BadRequest("half a surrogate", COMPLETIONS, text='{"model": "MODEL", "prompt": "\\ud800"}'),
    BadRequest("no messages", CHAT, {}),
    BadRequest("empty messages", CHAT, {"messages": []}),
    BadRequest("messages as a string", CHAT, {"messages": "hi"}),
    BadRequest("messages of text", CHAT, {"messages": ["hi"]}),
    BadRequest("a message without content", CHAT, {"messages": [{"role": "user"}]}),
    BadRequest("a message without a role", CHAT, {"messages": [{"content": "hi"}]}),
    BadRequest("an unknown role", CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}),
    BadRequest("content of a wrong type", CHAT, {"messages": [{"role": "user", "content": 5}]}),
    BadRequest("an unknown part", CHAT, {"messages": [{"role": "user", "content": [{"type": "smell"}]}]}),
    BadRequest("an image", CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}),
    BadRequest("no prompt", COMPLETIONS, {}),
    BadRequest("an empty text", COMPLETIONS, {"prompt": ""}),
    BadRequest("a mixed prompt", COMPLETIONS, {"prompt": ["a", 5]}),
    BadRequest("too many answers", COMPLETIONS, {"prompt": ["x"] * 100, "n": "100"}),
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
    *_values("temperature", -1, 99, "hot", "50", "nan"),
    *_values("temperature", -1, 99, path=CHAT),
    *_values("top_p", 2, 0, -0.5, path=CHAT),
    *_values("top_k", -7, 10**30),
    *_values("n", 0, -1, 10**6, "200", 200.0),
    *_values("stream_interval", 10**30),
    *_values("logprobs", -5, 10**6),
    *_values("top_logprobs", 10**6, path=CHAT),
    *_values("prompt_logprobs", -7),
    *_values("stop", 5, path=CHAT),
    *_values("presence_penalty", 99),
    *_values("logit_bias", {"99999": 1}, path=CHAT),
    *_values("seed", "lucky", 10**30),
    *_values("stream", "perhaps"),
    *_values("stream_options", {"include_usage": True}, path=CHAT),
    *_values("response_format", {"type": "poem"}, {"type": "json_schema"}, NO_SCHEMA, path=CHAT),
    *_values("tools", "hammer", path=CHAT),
    *_values("tool_choice", "required", path=CHAT),
    BadRequest("an unknown tool", CHAT, {"messages": HI, "tools": [TOOL], "tool_choice": OTHER_TOOL}),
    BadRequest("no input", "/v1/responses", {}),
    BadRequest("an unknown response", "/v1/responses", {"input": "x", "previous_response_id": "resp_none"}),
    BadRequest("in the background", "/v1/responses", {"input": "x", "background": True}),
    BadRequest("tokens of a wrong type", "/tokenize", {"prompt": 5}),
    BadRequest("an adapter that is not there", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/nowhere"}),
    BadRequest("an adapter of a long path", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x" * 3000}),
    BadRequest("an adapter of no path", "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/x\0y"}),
    BadRequest("an adapter without a path", "/v1/load_lora_adapter", {"lora_name": "x"}),
    BadRequest("an adapter that is not loaded", "/v1/unload_lora_adapter", {"lora_name": "nobody"}),
    BadRequest("a path that does not exist", "/v1/nothing", {"prompt": "hi"}),
    BadRequest("a wrong method", COMPLETIONS, method="GET"),
)
