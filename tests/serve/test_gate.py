"""The gate in front of an engine's server: names, bad input, keys, metrics."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gated import CHAT, HELLO, STATUS, Serve, Server, anyio_backend, done, load, serve, server, settle, tuned

from ktft.serve.front import asgi

__all__ = ["anyio_backend", "serve", "server", "tuned"]

pytestmark = pytest.mark.anyio


async def test_the_body_reaches_the_engine_unchanged(server: Server) -> None:
    content = {"model": "base", "messages": [{"role": "user", "content": "x" * 5000}]}
    response = await done(server, CHAT, content)
    assert (response.status, response.body) == (200, b"None None None ")
    assert json.loads(server.seen[0][1]) == content
    assert server.gate.admission.in_flight == 0


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
        (CHAT, {"model": "base", "messages": [{"role": "user"}]}, 400, "messages[0] has no content"),
        (CHAT, b'{"model": "base", "temperature": NaN}', 400, "NaN is no number"),
        (CHAT, {"model": "base", "messages": HELLO, "temperature": 99}, 400, "temperature is 99"),
        (CHAT, {"model": "base", "messages": HELLO, "n": 129}, 400, "n is 129; it goes from 1 to 128"),
        ("/v1/responses", {"model": "base", "input": "", "background": True}, 400, "background"),
        ("/tokenize", {"model": "other", "prompt": ""}, 404, "'other' is not served"),
        ("/v1/audio/speech", {"model": "base"}, 404, "no /v1/audio/speech"),
        ("/collective_rpc", {"method": "x"}, 404, "no /collective_rpc"),
    ],
)
async def test_bad_requests_never_reach_the_engine(
    server: Server, path: str, content: Any, status: int, words: str
) -> None:
    response = await done(server, path, content)
    assert response.status == status
    assert words in response.error["message"]
    assert not server.seen
    assert (await done(server, CHAT, {"model": "base", "messages": HELLO})).status == 200


async def test_names_are_optional_where_nothing_is_generated(server: Server) -> None:
    assert (await done(server, "/tokenize", {"prompt": "x"})).status == 200


@pytest.mark.parametrize("content", [{"messages": HELLO}, {"model": None, "messages": HELLO}])
async def test_the_only_model_needs_no_name(serve: Serve, content: Any) -> None:
    """Clients of vLLM leave `model` out, and its own tests do."""
    server = serve(adapter_swap=False)
    response = await done(server, CHAT, content)
    assert (response.status, response.body) == (200, b"None None None ")
    assert (await done(server, CHAT, {"model": "other", "messages": HELLO})).status == 404


async def test_large_bodies_are_refused_with_and_without_a_declared_length(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asgi.read_body, "__defaults__", (4000,))
    server = serve()
    for headers in ({}, {"content-length": "5000"}):
        response = await done(server, CHAT, b"x" * 5000, headers=headers)
        assert response.status == 413
        assert "4000 bytes" in response.error["message"]


async def test_other_content_types_are_refused(server: Server) -> None:
    response = await done(server, CHAT, b"model=base", headers={"content-type": "application/x-www-form-urlencoded"})
    assert response.status == 415
    assert "application/json" in response.error["message"]


async def test_a_client_that_disconnects_while_sending(server: Server) -> None:
    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    await server.gate(scope, receive, None)
    assert not server.seen


async def test_what_an_engine_raises_on_a_bad_request_closes_no_connection(server: Server) -> None:
    """Starlette would raise it again after its answer. An error of the engine's own still goes that way."""
    server.raises = 400
    response = await done(server, CHAT, {"model": "base", "messages": HELLO})
    assert response.error["message"] == "no prompt"
    server.raises = 500
    with pytest.raises(ValueError, match="no prompt"):
        await done(server, CHAT, {"model": "base", "messages": HELLO})


async def test_through_the_http_server_the_connection_stays(server: Server) -> None:
    """With Starlette's own middleware around the gate, as vLLM 0.24 has it."""
    from starlette.middleware.errors import ServerErrorMiddleware

    server.raises = 400
    around = ServerErrorMiddleware(server.gate, server.handled)
    server.gate = around  # type: ignore[assignment]
    for _ in range(2):
        assert (await done(server, CHAT, {"model": "base", "messages": HELLO})).status == 400
    server.raises = 500
    with pytest.raises(ValueError, match="no prompt"):
        await done(server, CHAT, {"model": "base", "messages": HELLO})


async def test_websockets_are_refused(server: Server) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await server.gate({"type": "websocket", "path": "/v1/realtime"}, None, send)
    assert sent[0]["type"] == "websocket.close"


# --- keys and metrics -------------------------------------------------------------------------------------------------


async def test_keys_guard_everything_but_health(serve: Serve, tuned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    guarded = [
        (CHAT, {"model": "base", "messages": HELLO}),
        (CHAT, b"{"),
        ("/tokenize", {"prompt": "x"}),
        ("/v1/load_lora_adapter", {"lora_name": "tuned", "lora_path": tuned}),
        ("/v1/unload_lora_adapter", {"lora_name": "tuned"}),
        ("/v1/models", None),
        ("/ktft/status", None),
        ("/ktft/routing", None),
        ("/metrics", None),
        ("/version", None),
        ("/abort_requests", {}),
        ("/start_profile", {}),
    ]
    server = serve()
    for where, content in guarded:
        for key in ("", "Bearer wrong", "Basic secret", "Bearer "):
            response = await done(server, where, content, headers={"authorization": key})
            assert response.status == 401, (where, key)
            assert "Authorization: Bearer" in response.error["message"]
    assert not server.seen and not server.engine.calls
    assert (await done(server, CHAT, guarded[0][1], headers={"authorization": "bearer secret"})).status == 200
    assert (await done(server, CHAT, guarded[0][1], headers={"x-api-key": "secret"})).status == 200
    assert (await done(server, "/metrics", headers={"authorization": "Bearer secret"})).status == 200
    assert (await done(server, "/health")).status == 200


async def test_status_and_metrics(server: Server, tuned: str) -> None:
    await load(server, tuned)
    status = json.loads((await done(server, "/ktft/status")).body)
    assert status["models"] == ["base", "tuned"] and status["base"] == "base"
    assert status["adapters"] == [{"name": "tuned", "path": tuned, "requests_in_flight": 0}]
    assert status["adapter_swaps"] == 1 and status["requests_in_flight"] == 0
    assert status["engine"] == STATUS
    assert json.loads((await done(server, "/ktft/routing")).body) == {"layout": 1, "layers": STATUS["heat"]}
    text = json.loads((await done(server, "/metrics")).body)
    for line in (
        'ktft_expert_seconds_total{lane="cpu"} 0.5',
        'ktft_expert_pairs_total{lane="cpu"} 12.0',
        'ktft_expert_heat_total{expert="1",layer="2"} 7.0',
        'ktft_adapter_info{base="base",name="tuned"} 1.0',
        "ktft_adapter_swaps_total 1.0",
        "ktft_requests_in_flight 0.0",
        'ktft_model_requests_in_flight{model="tuned"} 0.0',
    ):
        assert f"{line}\n" in text
    assert server.engine.calls.count("status") == 1  # cached


async def test_a_status_from_before_a_change_is_not_shown_after_it(server: Server, tuned: str) -> None:
    """The engine is asked before the change and answers after it."""
    answered = asyncio.Event()

    async def late() -> dict[str, Any]:
        answer = {**STATUS, "loaded": [*server.engine.loaded.values()]}
        await answered.wait()
        return answer

    server.engine.status = late  # type: ignore[method-assign]
    before = asyncio.ensure_future(done(server, "/ktft/status"))
    await settle()
    assert (await load(server, tuned)).status == 200
    answered.set()
    await before
    assert json.loads((await done(server, "/ktft/status")).body)["engine"]["loaded"] == [tuned]


async def test_a_dead_engine_does_not_hide_other_metrics(server: Server, tuned: str) -> None:
    server.engine.dead = True
    text = json.loads((await done(server, "/metrics")).body)
    assert "ktft_requests_in_flight 0.0" in text and "ktft_expert_seconds" not in text
    assert (await done(server, "/ktft/routing")).status == 503
    response = await load(server, tuned)
    assert response.status == 503
    assert "encountered an issue" in response.error["message"]
