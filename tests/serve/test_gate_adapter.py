"""The gate in front of an engine's server: one adapter at a time changes while requests are in flight."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from gated import (
    CHAT,
    HELLO,
    Serve,
    Server,
    adapter,
    anyio_backend,
    ask,
    done,
    load,
    request,
    serve,
    server,
    settle,
    tuned,
    unload,
)

__all__ = ["anyio_backend", "serve", "server", "tuned"]

pytestmark = pytest.mark.anyio


async def test_load_and_unload(server: Server, tuned: str, tmp_path: Path) -> None:
    response = await load(server, tuned)
    assert (response.status, json.loads(response.body)["model"]) == (200, "tuned")
    assert server.engine.calls == ["reset", f"set {tuned}"]  # old prefixes first, then the adapter
    response = await ask(server, "base")
    assert response.status == 404
    assert "what is served is the adapter tuned of base" in response.error["message"]
    assert (await ask(server, "tuned")).body == f"{tuned} ".encode() * 3
    assert server.engine.name == "tuned"
    models = json.loads((await done(server, "/v1/models")).body)
    assert models == {"data": [{"id": "tuned", "parent": "base", "root": tuned}]}
    assert json.loads((tmp_path / "adapter.json").read_text()) == [["tuned", tuned]]

    assert (await unload(server, "other")).status == 404
    assert (await unload(server)).status == 200
    assert server.engine.adapter is None
    assert (await ask(server, "tuned")).status == 404
    assert (await ask(server, "base")).status == 200
    assert json.loads((tmp_path / "adapter.json").read_text()) == []
    assert (await unload(server)).status == 404


async def test_a_server_without_adapter_swap_loads_none(serve: Serve, tuned: str) -> None:
    server = serve(adapter_swap=False)
    response = await load(server, tuned)
    assert response.status == 400
    assert "start it with --adapter-swap" in response.error["message"]


async def test_an_adapter_given_at_the_start(serve: Serve, tmp_path: Path) -> None:
    server = serve(adapters=(("mine", adapter(tmp_path / "tuned")),))
    assert (await ask(server, "base")).status == 404
    assert (await ask(server, "mine")).status == 200


async def test_swaps_wait_for_streams_and_requests_wait_for_swaps(server: Server, tuned: str) -> None:
    server.go.clear()
    stream, streamed = request(server, CHAT, {"model": "base", "messages": HELLO})
    await settle()
    assert streamed.status == 200  # the headers were sent, the body was not
    swap = asyncio.ensure_future(load(server, tuned))
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
    assert answered.body == f"{tuned} ".encode() * 3
    assert server.gate.admission.in_flight == server.gate.admission.waiting == 0


async def test_a_disconnected_stream_is_no_longer_in_flight(server: Server, tuned: str) -> None:
    server.go.clear()
    stream, streamed = request(server, CHAT, {"model": "base", "messages": HELLO})
    swap = asyncio.ensure_future(load(server, tuned))
    await settle()
    streamed.leave.set()
    await asyncio.gather(stream, swap)
    assert swap.result().status == 200


async def test_a_client_that_disconnects_while_waiting(server: Server, tuned: str) -> None:
    server.engine.slow = asyncio.Event()
    swap = asyncio.ensure_future(load(server, tuned))
    await settle()
    waits, waiting = request(server, CHAT, {"model": "tuned", "messages": HELLO})
    await settle()
    waiting.leave.set()
    await waits
    assert waiting.status == 0 and not server.seen
    assert server.gate.admission.waiting == 0
    server.engine.slow.set()
    await swap


async def test_waiting_too_long_is_answered_with_503(serve: Serve, tuned: str) -> None:
    """An endless stream blocks a swap, and an endless swap blocks requests. Each is told to try again."""
    server = serve(swap_timeout=0.2)
    server.go.clear()
    stream, _ = request(server, CHAT, {"model": "base", "messages": HELLO})
    await settle()
    response = await load(server, tuned)
    assert (response.status, response.headers["retry-after"]) == (503, "1")
    assert "in flight" in response.error["message"]
    server.go.set()
    await stream
    assert (await ask(server, "base")).status == 200  # nothing has changed

    server.engine.slow = asyncio.Event()
    swap = asyncio.ensure_future(load(server, tuned))
    await settle()
    assert (await ask(server, "base")).status == 503
    assert (await unload(server)).status == 404
    assert (await load(server, tuned, "second")).status == 503
    server.engine.slow.set()
    assert (await swap).status == 200
    assert (await ask(server, "tuned")).status == 200


async def test_swaps_run_one_after_the_other(server: Server, tmp_path: Path) -> None:
    """Requests that waited for the first swap are served before the second."""
    paths = [adapter(tmp_path / name) for name in ("one", "two")]
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
    assert server.gate.adapters.changes == 2


async def test_many_swaps_under_load_never_mix_adapters(server: Server, tmp_path: Path) -> None:
    paths = {name: adapter(tmp_path / name) for name in ("one", "two", "three")}
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


async def test_a_failed_load_changes_nothing(server: Server, tmp_path: Path) -> None:
    good, bad = adapter(tmp_path / "good"), adapter(tmp_path / "bad")
    await load(server, good, "good")
    server.engine.failure = "bad/adapter_model.safetensors: lora_A of layer 3 is [4, 64], rank is 8"
    response = await load(server, bad, "bad")
    assert response.status == 400
    assert response.error["message"] == server.engine.failure
    assert (await ask(server, "bad")).status == 404
    assert (await ask(server, "good")).body == f"{good} ".encode() * 3


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
async def test_bad_loads_are_refused_without_waiting(server: Server, content: Any, words: str) -> None:
    server.go.clear()  # a stream that would keep a swap waiting
    stream, _ = request(server, CHAT, {"model": "base", "messages": HELLO})
    response = await done(server, "/v1/load_lora_adapter", content)
    assert response.status == 400
    assert words in response.error["message"]
    server.go.set()
    await stream


async def test_a_swap_waits_until_prefixes_are_forgotten(
    serve: Serve, tuned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktft.serve.front.adapters._RESET_PAUSE", 0.0)
    server = serve()
    server.engine.busy = 3
    assert (await load(server, tuned)).status == 200
    assert server.engine.calls == ["reset"] * 4 + [f"set {tuned}"]
    server.engine.busy = 1 << 30
    response = await unload(server)
    assert response.status == 503
    assert server.engine.adapter == tuned
    assert (await ask(server, "tuned")).status == 200
