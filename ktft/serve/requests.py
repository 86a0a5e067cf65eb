"""Requests as they come over HTTP: which paths compute, what is wrong with a body, and answers in OpenAI's form."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY = 64 << 20  # bytes; images come as base64
MAX_CHOICES = 128  # OpenAI's own limit of `n`
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")

CHAT = ("/v1/chat/completions", "/v1/chat/completions/render")
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
    "/cohere/v2/chat": True,
    "/generative_scoring": True,
    "/inference/v1/generate": True,
    "/invocations": True,
    "/tokenize": False,
    "/detokenize": False,
}
"""Paths that take a request for a model, in any tested vLLM, and whether it has to name the model."""

PASSED = ("/ping", "/start_profile", "/stop_profile", "/abort_requests")
"""Other paths that take a POST."""

_GUARDED = ("/v1", "/v2", "/inference", "/cohere", "/ktft")


class Refusal(Exception):
    """An answer that says no: HTTP status, message, and `Retry-After` in seconds."""

    KINDS = {  # noqa: RUF012
        401: "AuthenticationError",
        404: "NotFoundError",
        413: "RequestEntityTooLargeError",
        415: "UnsupportedMediaTypeError",
        500: "InternalServerError",
        503: "ServiceUnavailableError",
    }

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.retry_after = status, param, retry_after

    async def answer(self, send: Send) -> None:
        """Send it."""
        kind = self.KINDS.get(self.status, "BadRequestError")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        await answer_json(send, {"error": error}, self.status, headers)


async def answer_json(
    send: Send, content: Any, status: int = 200, headers: MutableMapping[str, str] | None = None
) -> None:
    """A whole response."""
    body = json.dumps(content).encode()
    named = {"content-type": "application/json", "content-length": str(len(body))} | dict(headers or {})
    pairs = [(name.encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def header(scope: Scope, name: bytes) -> str:
    """A request's header, empty if it has none."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def path_of(scope: Scope) -> str:
    """The path without the prefix of a reverse proxy."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


def require_key(scope: Scope, digests: Iterable[bytes]) -> None:
    """Refuse a request that needs a key and has none of those with these SHA-256 digests.

    vLLM's own check lies behind this one and leaves paths without a version out.

    Raises:
        Refusal: 401.
    """
    path = path_of(scope)
    if scope["method"] == "OPTIONS" or not (path.startswith(_GUARDED) or path in COMPUTES):
        return
    scheme, _, key = header(scope, b"authorization").partition(" ")
    if not key:  # as Anthropic's client sends it
        scheme, key = "bearer", header(scope, b"x-api-key")
    digest = hashlib.sha256(key.encode()).digest()
    known = [secrets.compare_digest(digest, each) for each in digests]
    if scheme.lower() != "bearer" or not any(known):
        raise Refusal(401, "give the server's API key as `Authorization: Bearer KEY`")


async def read_body(scope: Scope, receive: Receive, limit: int = MAX_BODY) -> bytes | None:
    """The whole body; None if the client went away before its end.

    Raises:
        Refusal: it is longer than `limit`.
    """
    too_large = Refusal(413, f"the body has more than {limit} bytes")
    declared = header(scope, b"content-length")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise too_large
        more = message.get("more_body", False)
    return b"".join(chunks)


def replayed(body: bytes, receive: Receive) -> Receive:
    """What an application behind this one receives after the body was read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


def parse(scope: Scope, body: bytes) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        Refusal: it is none, or is not said to be one.
    """
    kind = header(scope, b"content-type").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refusal(415, f"Content-Type is {kind or 'not given'}; send application/json")
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refusal(400, f"the body is a JSON {type(content).__name__}; send an object")
    return content


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
    n = request.get("n")
    if isinstance(n, int) and n > MAX_CHOICES:
        raise Refusal(400, f"n is {n}; the most is {MAX_CHOICES}", param="n")
    if path in CHAT:
        messages = request.get("messages")
        for number, message in enumerate(messages if isinstance(messages, list) else ()):
            role = message.get("role") if isinstance(message, dict) else None
            if isinstance(role, str) and role not in CHAT_ROLES:
                raise Refusal(
                    400, f"messages[{number}].role is {role!r}; give one of {', '.join(CHAT_ROLES)}", param="messages"
                )
    return name
