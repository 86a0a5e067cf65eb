"""A small engine server behind the gate, in this process: what tests of the gate talk to.

Its paths are vLLM's. Its engine is this file's `Engine`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse

from ktft.serve.engine import EngineError
from ktft.serve.front import asgi
from ktft.serve.front.gate import Gate
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm.middleware import PATHS

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
STATUS = {
    "adapters": [],
    "expert_format": "bf16",
    "isa": "avx2",
    "threads": 2,
    "numa_nodes": 1,
    "packed_bytes": 4096,
    "lanes": {"cpu": {"pairs": 12, "seconds": 0.5}},
    "heat": {"1": [4, 0], "2": [1, 7]},
}


@dataclass
class Engine:
    """A `ktft.serve.engine.Client` that notes its calls.

    `loaded` are the directories of adapters by number, `announced` is what names stand for.
    """

    loaded: dict[int, str] = field(default_factory=dict)
    announced: dict[str, tuple[int, str]] = field(default_factory=dict)
    name: str = "at start"
    failure: str | None = None
    dead: bool = False
    calls: list[str] = field(default_factory=list)
    slow: asyncio.Event | None = None

    async def status(self) -> dict[str, Any]:
        self._require_alive()
        self.calls.append("status")
        return STATUS

    async def add_adapter(self, number: int, path: str) -> dict[str, Any]:
        self._require_alive()
        if self.slow is not None:
            await self.slow.wait()
        if self.failure:
            raise EngineError(self.failure, dead=False)
        self.calls.append(f"add {path}")
        assert number not in self.loaded
        self.loaded[number] = path
        return {"adapter": {"path": path}, "seconds": 0.1}

    async def remove_adapter(self, number: int) -> None:
        self._require_alive()
        self.calls.append(f"remove {self.loaded.pop(number)}")

    def announce(self, adapters: Mapping[str, tuple[int, str]]) -> None:
        self.announced = dict(adapters)

    def _require_alive(self) -> None:
        if self.dead:
            raise EngineError("the engine encountered an issue", dead=True)


class Server:
    """A small engine application. Each token of a response names the adapter that computed it."""

    def __init__(self, settings: ServeSettings, registry: CollectorRegistry) -> None:
        self.engine, self.registry = Engine(), registry
        self.engine.loaded = {number: path for number, (_, path) in enumerate(settings.adapters, start=1)}
        self.go = asyncio.Event()
        self.go.set()
        self.seen: list[tuple[str, bytes]] = []
        self.raises: int | None = None  # in place of an answer, which its handler of errors gives with this status
        self.exception_handlers = {Exception: self.handled}
        self.gate = Gate(self.inner, lambda scope: self.engine, PATHS, settings, registry)

    async def handled(self, request: Request, error: Exception) -> JSONResponse:
        said = {"message": str(error), "type": "BadRequestError", "code": self.raises}
        return JSONResponse({"error": said}, self.raises or 500)

    async def inner(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        if scope["method"] == "POST":
            message = await receive()
            assert not message["more_body"]
            body = message["body"]
        self.seen.append((scope["path"], body))
        if self.raises is not None:
            raise ValueError("no prompt")
        if scope["path"] == "/metrics":
            await asgi.answer_json(send, generate_latest(self.registry).decode())
            return
        if scope["path"] == "/v1/models":
            names = [self.engine.name, *self.engine.announced]
            await asgi.answer_json(send, {"data": [{"id": name, "parent": None} for name in names]})
            return
        number, adapter = self.engine.announced.get(json.loads(body).get("model") if body else "", (0, None))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            gone, go = asyncio.ensure_future(receive()), asyncio.ensure_future(self.go.wait())
            await asyncio.wait({gone, go}, return_when=asyncio.FIRST_COMPLETED)
            left = gone.done() and not go.done()
            gone.cancel(), go.cancel()
            if left:
                return
            if number:  # as the engine would: with what it holds now
                adapter = self.engine.loaded[number]
            await send({"type": "http.response.body", "body": f"{adapter} ".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@dataclass
class Response:
    """What a client has received so far."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    leave: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def error(self) -> dict[str, Any]:
        found = json.loads(self.body)["error"]
        assert found["message"] and found["type"] and found["code"] == self.status
        return found


def request(server: Server, path: str, content: Any = None, **how: Any) -> tuple[asyncio.Task[None], Response]:
    """Start a request. `content` is JSON, bytes, or None for a GET."""
    response = Response()
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {"content-type": "application/json"} | how.pop("headers", {})
    scope = {
        "type": "http",
        "method": "GET" if content is None else "POST",
        "path": path,
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        "app": server,
        **how,
    }
    parts = [{"type": "http.request", "body": body[i : i + 1000], "more_body": True} for i in range(0, len(body), 1000)]
    parts[-1]["more_body"] = False

    async def receive() -> Any:
        if parts:
            return parts.pop(0)
        await response.leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            response.status = message["status"]
            response.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        else:
            response.body += message.get("body", b"")

    return asyncio.ensure_future(server.gate(scope, receive, send)), response


async def done(server: Server, path: str, content: Any = None, **how: Any) -> Response:
    task, response = request(server, path, content, **how)
    await task
    return response


async def settle() -> None:
    """Let every task run as far as it can."""
    for _ in range(20):
        await asyncio.sleep(0)


def adapter(path: Path) -> str:
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    return str(path)


def load(server: Server, path: str, name: str = "tuned") -> Awaitable[Response]:
    return done(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})


def unload(server: Server, name: str = "tuned") -> Awaitable[Response]:
    return done(server, "/v1/unload_lora_adapter", {"lora_name": name})


def ask(server: Server, model: str) -> Awaitable[Response]:
    return done(server, CHAT, {"model": model, "messages": HELLO})


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


Serve = Callable[..., Server]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """`serve(**settings)` -> a new server.

    If a test hangs, all threads are printed and the run ends.
    """
    checkpoint = tmp_path / "base"
    checkpoint.mkdir()
    common = {"swap_timeout": 60.0, "adapter_swap": True, "status_path": str(tmp_path / "status.json")}

    def make(**settings: Any) -> Server:
        return Server(ServeSettings(str(checkpoint), **common | settings), CollectorRegistry())

    faulthandler.dump_traceback_later(300, exit=True)
    yield make
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve()


@pytest.fixture
def tuned(tmp_path: Path) -> str:
    """The directory of an adapter."""
    return adapter(tmp_path / "tuned")
