"""ASGI's messages: reading a request's path, headers and body, and answering in the form of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY = 64 << 20  # bytes; images come as base64


class Gone(Exception):
    """The client disconnected before its request was answered."""


class Refusal(Exception):
    """An error that answers a request.

    Args:
        status, message: of HTTP, and for the person who sent the request.
        param: the field of the request that is wrong.
        retry_after: seconds after which the same request may work.
    """

    KINDS = {  # noqa: RUF012
        401: "AuthenticationError",
        403: "PermissionDeniedError",
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
        """Send this as a whole response."""
        kind = self.KINDS.get(self.status, "BadRequestError")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        await answer_json(send, {"error": error}, self.status, headers)


async def answer_json(
    send: Send, content: Any, status: int = 200, headers: MutableMapping[str, str] | None = None
) -> None:
    """Send a whole response, its body JSON."""
    body = json.dumps(content).encode()
    named = {"content-type": "application/json", "content-length": str(len(body))} | dict(headers or {})
    pairs = [(name.encode(), value.encode()) for name, value in named.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


class Answered:
    """A `send` that knows what of its response has been sent.

    Attributes:
        status: of HTTP; 0 before the response has begun.
        complete: whether the whole response was sent.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status, self.complete = 0, False

    async def __call__(self, message: Message) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)


def header(scope: Scope, name: bytes) -> str:
    """A header of a request; empty if the request has none of that name."""
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


def path_of(scope: Scope) -> str:
    """A request's path, without the prefix of a reverse proxy."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


async def read_body(scope: Scope, receive: Receive, limit: int = MAX_BODY) -> bytes:
    """The whole body of a request.

    Raises:
        Gone: the client left before its end.
        Refusal: the body is longer than `limit` bytes.
    """
    too_large = Refusal(413, f"the body has more than {limit} bytes")
    declared = header(scope, b"content-length")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    chunks, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limit:
            raise too_large
        more = message.get("more_body", False)
    return b"".join(chunks)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` for the application behind this one, after the body was read."""
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


def parse(scope: Scope, body: bytes) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        Refusal: the body is no JSON object, or `Content-Type` does not say that it is JSON.
    """
    kind = header(scope, b"content-type").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refusal(415, f"Content-Type is {kind or 'not given'}; send application/json")
    try:
        content = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise Refusal(400, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refusal(400, f"the body is a JSON {type(content).__name__}; send an object")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
