"""Changes of adapters at the gate: they wait for the requests of their own name, and those wait for them."""

from __future__ import annotations

import asyncio
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


async def test_a_disconnected_stream_is_no_longer_in_flight(server: Server, tuned: str) -> None:
    await load(server, tuned)
    server.go.clear()
    stream, streamed = request(server, CHAT, {"model": "tuned", "messages": HELLO})
    await settle()
    change = asyncio.ensure_future(unload(server))
    await settle()
    assert not change.done()
    streamed.leave.set()
    await asyncio.gather(stream, change)
    assert change.result().status == 200


async def test_requests_wait_for_a_change_of_their_name(server: Server, tuned: str, tmp_path: Path) -> None:
    """They then get the new adapter. One that leaves meanwhile reaches no engine."""
    other = adapter(tmp_path / "other")
    await load(server, tuned)
    server.go.clear()
    stream, streamed = request(server, CHAT, {"model": "tuned", "messages": HELLO})
    await settle()
    change = asyncio.ensure_future(load(server, other))
    await settle()
    waits, answered = request(server, CHAT, {"model": "tuned", "messages": HELLO})
    leaves, leaving = request(server, CHAT, {"model": "tuned", "messages": HELLO})
    await settle()
    assert server.gate.admission.waiting == 2 and not change.done()
    leaving.leave.set()
    await leaves
    assert leaving.status == 0 and server.gate.admission.waiting == 1
    server.go.set()
    await asyncio.gather(stream, change, waits)
    assert change.result().status == 200
    assert streamed.body == f"{tuned} ".encode() * 3 and answered.body == f"{other} ".encode() * 3
    assert server.gate.admission.in_flight == server.gate.admission.waiting == 0
    assert server.engine.calls == [f"add {tuned}", f"add {other}", f"remove {tuned}"]


async def test_a_request_that_waits_too_long_is_told_to_try_again(serve: Serve, tuned: str) -> None:
    server = serve(swap_timeout=2.0)  # the request must come while the change waits, also on a busy machine
    await load(server, tuned)
    server.go.clear()
    stream, _ = request(server, CHAT, {"model": "tuned", "messages": HELLO})
    await settle()
    change = asyncio.ensure_future(unload(server))
    await settle()
    answers = await asyncio.gather(ask(server, "tuned"), change)
    assert [(each.status, each.headers["retry-after"]) for each in answers] == [(503, "2")] * 2
    assert "in flight" in answers[1].error["message"]
    server.go.set()
    await stream
    assert (await ask(server, "tuned")).status == 200  # nothing has changed


async def test_changes_run_one_after_the_other(server: Server, tmp_path: Path) -> None:
    paths = [adapter(tmp_path / name) for name in ("one", "two")]
    server.engine.slow = asyncio.Event()
    first, second = (asyncio.ensure_future(load(server, path, Path(path).name)) for path in paths)
    await settle()
    assert not server.engine.calls
    server.engine.slow.set()
    assert [(await each).status for each in (first, second)] == [200, 200]
    assert server.engine.calls == [f"add {path}" for path in paths] and server.gate.adapters.changes == 2


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
