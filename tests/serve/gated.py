"""vLLM's server in small, with the gate before it, in this process: what tests of the gate talk to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ktft.serve.front import requests
from ktft.serve.front.gate import Gate
from ktft.serve.runtime.settings import ServeSettings

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
STATUS = {
    "adapter": None,
    "expert_format": "bf16",
    "isa": "avx2",
    "threads": 2,
    "numa_nodes": 1,
    "packed_bytes": 4096,
    "lanes": {"cpu": {"pairs": 12, "seconds": 0.5}},
    "heat": {"1": [4, 0], "2": [1, 7]},
}


@dataclass(frozen=True)
class BaseModelPath:
    """As vLLM's."""

    name: str
    model_path: str


@dataclass
class Engine:
    """What the gate needs of vLLM's engine client, and what it was asked."""

    adapter: str | None = None
    failure: str | None = None
    errored: bool = False
    busy: int = 0  # resets of the prefix cache that fail
    calls: list[str] = field(default_factory=list)
    slow: asyncio.Event | None = None

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        self.busy -= 1
        return self.busy < 0

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        if self.errored:
            raise RuntimeError("EngineCore encountered an issue")
        if method == "ktft_status":
            self.calls.append("status")
            return [STATUS]
        assert method == "ktft_set_adapter"
        if self.slow is not None:
            await self.slow.wait()
        if self.failure:
            raise Exception(f"Call to collective_rpc method failed: {self.failure}")
        self.calls.append(f"set {args[0]}")
        self.adapter = args[0]
        return [{"adapter": args[0] and {"path": args[0]}, "seconds": 0.1}]


class Server:
    """vLLM's application in small: a response says which adapter computed it, token by token."""

    def __init__(self, settings: ServeSettings, registry: CollectorRegistry) -> None:
        self.engine, self.registry = Engine(settings.adapter), registry
        self.go = asyncio.Event()
        self.go.set()
        self.seen: list[tuple[str, bytes]] = []
        names = [BaseModelPath("at start", settings.checkpoint)]
        models = SimpleNamespace(base_model_paths=names)
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=self.engine, openai_serving_models=models))
        self.gate = Gate(self.inner, settings, registry)

    async def inner(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        if scope["method"] == "POST":
            message = await receive()
            assert not message["more_body"]
            body = message["body"]
        self.seen.append((scope["path"], body))
        if scope["path"] == "/metrics":
            await requests.answer_json(send, generate_latest(self.registry).decode())
            return
        if scope["path"] == "/v1/models":
            names = self.app.state.openai_serving_models.base_model_paths
            await requests.answer_json(send, {"data": [{"id": each.name, "parent": None} for each in names]})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            gone, go = asyncio.ensure_future(receive()), asyncio.ensure_future(self.go.wait())
            await asyncio.wait({gone, go}, return_when=asyncio.FIRST_COMPLETED)
            left = gone.done() and not go.done()
            gone.cancel(), go.cancel()
            if left:
                return
            await send({"type": "http.response.body", "body": f"{self.engine.adapter} ".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@dataclass
class Response:
    """What a client has got so far."""

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
    """Begin a request. `content` is JSON, bytes, or None for a GET."""
    response = Response()
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    headers = {"content-type": "application/json"} | how.pop("headers", {})
    scope = {
        "type": "http",
        "method": "GET" if content is None else "POST",
        "path": path,
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
        "app": server.app,
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
    """Let everything go on as far as it can."""
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


Run = Callable[..., None]


@pytest.fixture
def serve(tmp_path: Path) -> Run:
    """`serve(test, **settings)` runs `await test(server)` around a new server."""
    checkpoint = tmp_path / "base"
    checkpoint.mkdir()

    def run(test: Callable[[Server], Coroutine[Any, Any, None]], **settings: Any) -> None:
        async def inside() -> None:
            values = {
                "swap_timeout": 60.0,
                "adapter_swap": True,
                "status_path": str(tmp_path / "status.json"),
            } | settings
            async with asyncio.timeout(300):
                await test(Server(ServeSettings(str(checkpoint), **values), CollectorRegistry()))

        asyncio.run(inside())

    return run
