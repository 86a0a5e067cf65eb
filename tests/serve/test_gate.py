"""The gate before vLLM's server, in this process around a small application: names, swaps, bad input, metrics."""

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

from ktft.serve import requests
from ktft.serve.gate import Gate
from ktft.serve.settings import ServeSettings

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
STATUS = {
    "adapter": None,
    "expert_format": "bf16",
    "isa": "avx2",
    "threads": 2,
    "numa_nodes": 1,
    "packed_bytes": 4096,
    "lanes": {"cpu": {"calls": 3, "tokens": 12, "seconds": 0.5}},
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
        return [{"path": args[0]}]


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


Run = Callable[..., None]


@pytest.fixture
def serve(tmp_path: Path) -> Run:
    """`serve(test, **settings)` runs `await test(server)` around a new server."""
    checkpoint = tmp_path / "base"
    checkpoint.mkdir()

    def run(test: Callable[[Server], Coroutine[Any, Any, None]], **settings: Any) -> None:
        async def inside() -> None:
            values = {
                "swap_timeout": 5.0,
                "adapter_swap": True,
                "status_path": str(tmp_path / "status.json"),
            } | settings
            async with asyncio.timeout(30):
                await test(Server(ServeSettings(str(checkpoint), **values), CollectorRegistry()))

        asyncio.run(inside())

    return run


def test_the_body_reaches_vllm_as_it_came(serve: Run) -> None:
    async def test(server: Server) -> None:
        content = {"model": "base", "messages": [{"role": "user", "content": "x" * 5000}]}
        response = await done(server, CHAT, content)
        assert (response.status, response.body) == (200, b"None None None ")
        assert json.loads(server.seen[0][1]) == content
        assert server.gate.admission.in_flight == 0

    serve(test)


@pytest.mark.parametrize(
    ("path", "content", "status", "words"),
    [
        (CHAT, {"messages": HELLO}, 400, "model is missing"),
        (CHAT, {"model": None, "messages": HELLO}, 400, "model is missing"),
        (CHAT, {"model": 5, "messages": HELLO}, 400, "model is 5"),
        (CHAT, {"model": "", "messages": HELLO}, 400, "model is ''"),
        (CHAT, {"model": "other", "messages": HELLO}, 404, "'other' is not served; what is served is base"),
        (CHAT, b"{", 400, "not JSON"),
        (CHAT, b"\xff\xfe\xfd", 400, "not JSON"),
        (CHAT, b"[" * 200_000, 400, "not JSON"),
        (CHAT, b"[]", 400, "JSON list; send an object"),
        (CHAT, {"model": "base", "messages": [{"role": "wizard", "content": ""}]}, 400, "messages[0].role is 'wizard'"),
        (CHAT, {"model": "base", "messages": HELLO, "n": 129}, 400, "n is 129; the most is 128"),
        ("/v1/responses", {"model": "base", "input": "", "background": True}, 400, "background"),
        ("/tokenize", {"model": "other", "prompt": ""}, 404, "'other' is not served"),
        ("/v1/audio/speech", {"model": "base"}, 404, "no /v1/audio/speech"),
        ("/collective_rpc", {"method": "x"}, 404, "no /collective_rpc"),
    ],
)
def test_bad_requests_never_reach_the_engine(serve: Run, path: str, content: Any, status: int, words: str) -> None:
    async def test(server: Server) -> None:
        response = await done(server, path, content)
        assert response.status == status
        assert words in response.error["message"]
        assert not server.seen
        assert (await done(server, CHAT, {"model": "base", "messages": HELLO})).status == 200

    serve(test)


def test_names_are_optional_where_nothing_is_generated(serve: Run) -> None:
    async def test(server: Server) -> None:
        assert (await done(server, "/tokenize", {"prompt": "x"})).status == 200

    serve(test)


def test_a_body_is_bounded_whether_its_length_is_declared_or_not(serve: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(server: Server) -> None:
        for headers in ({}, {"content-length": "5000"}):
            response = await done(server, CHAT, b"x" * 5000, headers=headers)
            assert response.status == 413
            assert "4000 bytes" in response.error["message"]

    monkeypatch.setattr(requests.read_body, "__defaults__", (4000,))
    serve(test)


def test_another_content_type(serve: Run) -> None:
    async def test(server: Server) -> None:
        response = await done(
            server, CHAT, b"model=base", headers={"content-type": "application/x-www-form-urlencoded"}
        )
        assert response.status == 415
        assert "application/json" in response.error["message"]

    serve(test)


def test_a_client_that_leaves_while_it_sends(serve: Run) -> None:
    async def test(server: Server) -> None:
        async def receive() -> Any:
            return {"type": "http.disconnect"}

        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "app": server.app}
        await server.gate(scope, receive, None)
        assert not server.seen

    serve(test)


def test_websockets_are_refused(serve: Run) -> None:
    async def test(server: Server) -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await server.gate({"type": "websocket", "path": "/v1/realtime"}, None, send)
        assert sent[0]["type"] == "websocket.close"

    serve(test)


# --- the adapter ------------------------------------------------------------------------------------------------------


def load(server: Server, path: str, name: str = "tuned") -> Awaitable[Response]:
    return done(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})


def unload(server: Server, name: str = "tuned") -> Awaitable[Response]:
    return done(server, "/v1/unload_lora_adapter", {"lora_name": name})


def ask(server: Server, model: str) -> Awaitable[Response]:
    return done(server, CHAT, {"model": model, "messages": HELLO})


def test_load_and_unload(serve: Run, tmp_path: Path) -> None:
    path = adapter(tmp_path / "tuned")

    async def test(server: Server) -> None:
        response = await load(server, path)
        assert (response.status, json.loads(response.body)["model"]) == (200, "tuned")
        assert server.engine.calls == ["reset", f"set {path}"]  # old prefixes first, then the adapter
        response = await ask(server, "base")
        assert response.status == 404
        assert "what is served is the adapter tuned of base" in response.error["message"]
        assert (await ask(server, "tuned")).body == f"{path} ".encode() * 3
        names = server.app.state.openai_serving_models.base_model_paths
        assert [each.name for each in names] == ["tuned"]
        models = json.loads((await done(server, "/v1/models")).body)
        assert models == {"data": [{"id": "tuned", "parent": "base", "root": path}]}
        assert json.loads((tmp_path / "adapter.json").read_text()) == ["tuned", path]

        assert (await unload(server, "other")).status == 404
        assert (await unload(server)).status == 200
        assert server.engine.adapter is None
        assert (await ask(server, "tuned")).status == 404
        assert (await ask(server, "base")).status == 200
        assert json.loads((tmp_path / "adapter.json").read_text()) is None
        assert (await unload(server)).status == 404

    serve(test)


def test_a_server_without_room_for_adapters(serve: Run, tmp_path: Path) -> None:
    path = adapter(tmp_path / "tuned")

    async def test(server: Server) -> None:
        response = await load(server, path)
        assert response.status == 400
        assert "start it with --adapter-swap" in response.error["message"]

    serve(test, adapter_swap=False)


def test_the_adapter_of_the_start(serve: Run, tmp_path: Path) -> None:
    async def test(server: Server) -> None:
        assert (await ask(server, "base")).status == 404
        assert (await ask(server, "mine")).status == 200

    serve(test, adapter=adapter(tmp_path / "tuned"), adapter_name="mine")


def test_a_swap_waits_for_streams_and_requests_wait_for_the_swap(serve: Run, tmp_path: Path) -> None:
    path = adapter(tmp_path / "tuned")

    async def test(server: Server) -> None:
        server.go.clear()
        stream, streamed = request(server, CHAT, {"model": "base", "messages": HELLO})
        await settle()
        assert streamed.status == 200  # headers are out, the body is not
        swap = asyncio.ensure_future(load(server, path))
        await settle()
        old, refused = request(server, CHAT, {"model": "base", "messages": HELLO})
        new, answered = request(server, CHAT, {"model": "tuned", "messages": HELLO})
        await settle()
        assert server.gate.admission.waiting == 2
        assert not swap.done() and not server.engine.calls
        server.go.set()
        await asyncio.gather(stream, swap, old, new)
        assert streamed.body == b"None None None "
        assert swap.result().status == 200
        assert refused.status == 404
        assert answered.body == f"{path} ".encode() * 3
        assert server.gate.admission.in_flight == server.gate.admission.waiting == 0

    serve(test)


def test_a_stream_whose_client_leaves_is_no_longer_in_flight(serve: Run, tmp_path: Path) -> None:
    path = adapter(tmp_path / "tuned")

    async def test(server: Server) -> None:
        server.go.clear()
        stream, streamed = request(server, CHAT, {"model": "base", "messages": HELLO})
        swap = asyncio.ensure_future(load(server, path))
        await settle()
        streamed.leave.set()
        await asyncio.gather(stream, swap)
        assert swap.result().status == 200

    serve(test)


def test_a_client_that_leaves_while_it_waits(serve: Run, tmp_path: Path) -> None:
    path = adapter(tmp_path / "tuned")

    async def test(server: Server) -> None:
        server.engine.slow = asyncio.Event()
        swap = asyncio.ensure_future(load(server, path))
        await settle()
        waits, waiting = request(server, CHAT, {"model": "tuned", "messages": HELLO})
        await settle()
        waiting.leave.set()
        await waits
        assert waiting.status == 0 and not server.seen
        assert server.gate.admission.waiting == 0
        server.engine.slow.set()
        await swap

    serve(test)


def test_what_takes_too_long_is_busy(serve: Run, tmp_path: Path) -> None:
    """A stream that does not end keeps the adapter; a swap that does not end keeps requests. All may try again."""
    path = adapter(tmp_path / "tuned")

    async def test(server: Server) -> None:
        server.go.clear()
        stream, _ = request(server, CHAT, {"model": "base", "messages": HELLO})
        await settle()
        response = await load(server, path)
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert "in flight" in response.error["message"]
        server.go.set()
        await stream
        assert (await ask(server, "base")).status == 200  # nothing has changed

        server.engine.slow = asyncio.Event()
        swap = asyncio.ensure_future(load(server, path))
        await settle()
        assert (await ask(server, "base")).status == 503
        assert (await unload(server)).status == 404
        assert (await load(server, path, "second")).status == 503
        server.engine.slow.set()
        assert (await swap).status == 200
        assert (await ask(server, "tuned")).status == 200

    serve(test, swap_timeout=0.2)


def test_swaps_come_one_after_the_other(serve: Run, tmp_path: Path) -> None:
    """And requests that waited for the first get in before the second."""
    paths = [adapter(tmp_path / name) for name in ("one", "two")]

    async def test(server: Server) -> None:
        server.engine.slow = asyncio.Event()
        first = asyncio.ensure_future(load(server, paths[0], "one"))
        await settle()
        waits, answered = request(server, CHAT, {"model": "one", "messages": HELLO})
        await settle()
        second = asyncio.ensure_future(load(server, paths[1], "two"))
        await settle()
        server.engine.slow.set()
        assert [(await each).status for each in (first, second)] == [200, 200]
        await waits
        assert answered.body == f"{paths[0]} ".encode() * 3
        assert server.engine.calls == ["reset", f"set {paths[0]}", "reset", f"set {paths[1]}"]
        assert server.gate.swaps == 2

    serve(test)


def test_many_swaps_under_load_never_mix_adapters(serve: Run, tmp_path: Path) -> None:
    paths = {name: adapter(tmp_path / name) for name in ("one", "two", "three")}

    async def test(server: Server) -> None:
        counts = {200: 0, 404: 0}

        async def client(name: str) -> None:
            for _ in range(60):
                response = await ask(server, name)
                counts[response.status] += 1
                if response.status == 200:
                    assert response.body == f"{paths[name]} ".encode() * 3
                await asyncio.sleep(0)

        async def swapper() -> None:
            for number in range(30):
                name = list(paths)[number % 3]
                assert (await load(server, paths[name], name)).status == 200
                await asyncio.sleep(0)

        await asyncio.gather(swapper(), *(client(name) for name in (*paths, *paths)))
        assert min(counts.values()) > 30

    serve(test)


def test_a_failed_load_changes_nothing(serve: Run, tmp_path: Path) -> None:
    good, bad = adapter(tmp_path / "good"), adapter(tmp_path / "bad")

    async def test(server: Server) -> None:
        await load(server, good, "good")
        server.engine.failure = "bad/adapter_model.safetensors: lora_A of layer 3 is [4, 64], rank is 8"
        response = await load(server, bad, "bad")
        assert response.status == 400
        assert response.error["message"] == server.engine.failure
        assert (await ask(server, "bad")).status == 404
        assert (await ask(server, "good")).body == f"{good} ".encode() * 3

    serve(test)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({}, "lora_name is None; give lora_name and lora_path"),
        ({"lora_name": "x"}, "lora_path is None"),
        ({"lora_name": "x", "lora_path": "/nowhere"}, "/nowhere has no adapter_config.json"),
        ({"lora_name": "base", "lora_path": "/nowhere"}, "the base model's own name"),
        ({"lora_name": 5, "lora_path": "/nowhere"}, "lora_name is 5"),
    ],
)
def test_bad_loads_are_refused_before_anything_waits(serve: Run, content: Any, words: str) -> None:
    async def test(server: Server) -> None:
        server.go.clear()  # a stream that would keep a swap waiting
        stream, _ = request(server, CHAT, {"model": "base", "messages": HELLO})
        response = await done(server, "/v1/load_lora_adapter", content)
        assert response.status == 400
        assert words in response.error["message"]
        server.go.set()
        await stream

    serve(test)


def test_prefixes_that_are_still_held(serve: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = adapter(tmp_path / "tuned")
    monkeypatch.setattr("ktft.serve.gate._RESET_PAUSE", 0.0)

    async def test(server: Server) -> None:
        server.engine.busy = 3
        assert (await load(server, path)).status == 200
        assert server.engine.calls == ["reset"] * 4 + [f"set {path}"]
        server.engine.busy = 1 << 30
        response = await unload(server)
        assert response.status == 503
        assert server.engine.adapter == path
        assert (await ask(server, "tuned")).status == 200

    serve(test)


# --- keys and metrics -------------------------------------------------------------------------------------------------


def test_keys_guard_everything_that_computes_or_tells(
    serve: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    path = adapter(tmp_path / "tuned")
    guarded = [
        (CHAT, {"model": "base", "messages": HELLO}),
        (CHAT, b"{"),
        ("/tokenize", {"prompt": "x"}),
        ("/v1/load_lora_adapter", {"lora_name": "tuned", "lora_path": path}),
        ("/v1/unload_lora_adapter", {"lora_name": "tuned"}),
        ("/v1/models", None),
        ("/ktft/status", None),
    ]

    async def test(server: Server) -> None:
        for where, content in guarded:
            for key in ("", "Bearer wrong", "Basic secret", "Bearer "):
                response = await done(server, where, content, headers={"authorization": key})
                assert response.status == 401, (where, key)
                assert "Authorization: Bearer" in response.error["message"]
        assert not server.seen and not server.engine.calls
        assert (await done(server, CHAT, guarded[0][1], headers={"authorization": "bearer secret"})).status == 200
        assert (await done(server, CHAT, guarded[0][1], headers={"x-api-key": "secret"})).status == 200
        assert (await done(server, "/metrics")).status == 200

    serve(test)


def test_status_and_metrics(serve: Run, tmp_path: Path) -> None:
    path = adapter(tmp_path / "tuned")

    async def test(server: Server) -> None:
        await load(server, path)
        status = json.loads((await done(server, "/ktft/status")).body)
        assert status["adapter"] == {"name": "tuned", "path": path}
        assert status["adapter_swaps"] == 1 and status["requests_in_flight"] == 0
        assert status["engine"] == STATUS
        text = json.loads((await done(server, "/metrics")).body)
        for line in (
            'ktft_expert_seconds_total{lane="cpu"} 0.5',
            'ktft_expert_tokens_total{lane="cpu"} 12.0',
            'ktft_expert_heat_total{expert="1",layer="2"} 7.0',
            'ktft_adapter_info{base="base",name="tuned"} 1.0',
            "ktft_adapter_swaps_total 1.0",
            "ktft_requests_in_flight 0.0",
        ):
            assert f"{line}\n" in text
        assert server.engine.calls.count("status") == 1  # cached

    serve(test)


def test_a_dead_engine_leaves_the_other_metrics(serve: Run, tmp_path: Path) -> None:
    path = adapter(tmp_path / "tuned")

    async def test(server: Server) -> None:
        server.engine.errored = True
        text = json.loads((await done(server, "/metrics")).body)
        assert "ktft_requests_in_flight 0.0" in text and "ktft_expert_seconds" not in text
        response = await load(server, path)
        assert response.status == 503
        assert "EngineCore" in response.error["message"]

    serve(test)
