"""Which requests the server lets in: origins of web pages, host names, keys, numbers.

The small server is wrapped in `CORSMiddleware` with the settings that vLLM 0.24 has by default.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import httpx
import pytest
from gated import CHAT, HELLO, Serve, Server, adapter, anyio_backend, bearer, serve, tuned
from httpx import ASGITransport, AsyncClient
from starlette.middleware.cors import CORSMiddleware

__all__ = ["anyio_backend", "serve", "tuned"]

pytestmark = pytest.mark.anyio

FOREIGN = {"Origin": "https://evil.example"}
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
ASK = {"model": "base", "messages": HELLO}


class Client(AsyncClient):
    """An HTTP client of a server in this process."""

    def __init__(self, server: Server) -> None:
        inner = server.gate.app
        server.gate.app = CORSMiddleware(inner, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
        super().__init__(transport=ASGITransport(app=server.gate), base_url="http://127.0.0.1:8000", timeout=None)
        self.server = server


@pytest.fixture
def client(serve: Serve) -> Client:
    return Client(serve())


def load(client: Client, path: str, name: str = "tuned", **headers: str) -> Awaitable[httpx.Response]:
    body = {"lora_name": name, "lora_path": path}
    return client.post("/v1/load_lora_adapter", json=body, headers=headers)


def message(response: httpx.Response) -> str:
    error = response.json()["error"]
    assert error["type"] and error["code"] == response.status_code
    text: str = error["message"]
    return text


# --- origins ----------------------------------------------------------------------------------------------------------


async def test_pages_of_other_origins_read_and_change_nothing(client: Client, tuned: str) -> None:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    for origin in ("https://evil.example", "http://127.0.0.1:3000", "http://localhost:8000", "null"):
        page = {"Origin": origin}
        answers = [
            await client.options("/v1/load_lora_adapter", headers=page | asked),
            await load(client, tuned, **page),
            await client.post("/v1/unload_lora_adapter", json={"lora_name": "tuned"}, headers=page),
            await client.post(CHAT, json=ASK, headers=page),
            await client.post("/abort_requests", headers=page),
            await client.get("/v1/models", headers=page),
            await client.get("/ktft/status", headers=page),
            await client.get("/metrics", headers=page),
        ]
        for answer in answers:
            assert answer.status_code == 403, (origin, answer.request.url)
            assert "access-control-allow-origin" not in answer.headers
        assert f"""-- --allowed-origins '["{origin}"]'""" in message(answers[1])
    assert not client.server.seen and not client.server.engine.calls

    own = {"Origin": "http://127.0.0.1:8000"}  # vLLM's /docs
    for page in (own, {}):  # and curl, openai
        assert (await client.post(CHAT, json=ASK, headers=page)).status_code == 200
    assert (await load(client, tuned, **own)).status_code == 200


async def test_an_allowed_origin_reads_answers_and_refusals(serve: Serve) -> None:
    client = Client(serve(origins=["https://good.example"]))
    page = {"Origin": "https://good.example"}
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
    assert (await client.options(CHAT, headers=page | asked)).status_code == 200
    for body, status in ((ASK, 200), ({"model": "other", "messages": HELLO}, 404)):
        answer = await client.post(CHAT, json=body, headers=page)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] in ("https://good.example", "*")
    assert (await client.post(CHAT, json=ASK, headers=FOREIGN)).status_code == 403


async def test_the_user_can_allow_any_origin(serve: Serve) -> None:
    client = Client(serve(origins=["*"]))
    assert (await client.post(CHAT, json=ASK, headers=FOREIGN)).status_code == 200


# --- hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "127.0.0.1:9", "[::1]:8000", "LocalHost", "proxy.lan"])
async def test_own_host_names_are_let_in(serve: Serve, host: str) -> None:
    client = Client(serve(hosts=[*LOCAL_NAMES, "proxy.lan"]))
    assert (await client.post(CHAT, json=ASK, headers={"Host": host})).status_code == 200
    assert (await client.post(CHAT, json=ASK, headers={"Host": host, "Origin": f"http://{host}"})).status_code == 200


@pytest.mark.parametrize("host", ["evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "[::1", "@"])
async def test_foreign_host_names_are_refused(serve: Serve, tuned: str, host: str) -> None:
    """DNS rebinding: the page has the origin that it asks, and only the Host header gives it away."""
    client = Client(serve(hosts=LOCAL_NAMES))
    page = {"Host": host, "Origin": f"http://{host}"}
    for answer in (
        await load(client, tuned, **page),
        await client.get("/v1/models", headers=page),
        await client.get("/health", headers={"Host": host}),
    ):
        assert answer.status_code == 403 and "--allowed-host" in message(answer)
    assert not client.server.seen and not client.server.engine.calls


# --- keys -------------------------------------------------------------------------------------------------------------


async def test_an_admin_key_differs_from_the_users_key(
    serve: Serve, tuned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "user")
    monkeypatch.setenv("KTFT_ADMIN_KEY", "admin")
    client = Client(serve())
    for changing in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/abort_requests", "/start_profile"):
        for headers, status in ((bearer("user"), 403), (bearer("wrong"), 401), ({}, 401)):
            answer = await client.post(changing, json={"lora_name": "tuned", "lora_path": tuned}, headers=headers)
            assert answer.status_code == status, (changing, headers)
            assert "admin key" in message(answer)
    assert not client.server.engine.calls and not client.server.seen
    assert (await load(client, tuned, **bearer("admin"))).status_code == 200
    ask = ASK | {"model": "tuned"}
    for key in ("user", "admin"):
        assert (await client.post(CHAT, json=ask, headers=bearer(key))).status_code == 200
    assert (await client.post(CHAT, json=ask, headers={"x-api-key": "admin"})).status_code == 200
    assert (await client.post(CHAT, json=ask, headers=bearer("wrong"))).status_code == 401


async def test_with_an_admin_key_alone_users_need_no_key(
    serve: Serve, tuned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setenv("KTFT_ADMIN_KEY", "admin")
    client = Client(serve())
    assert (await load(client, tuned)).status_code == 401
    assert (await client.post(CHAT, json=ASK)).status_code == 200
    assert (await load(client, tuned, **bearer("admin"))).status_code == 200


# --- numbers ----------------------------------------------------------------------------------------------------------

MANY = 10**30


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 129},
        {"n": "100000"},
        {"n": 100000.0},
        {"n": " 1_000 "},
        {"n": 0},
        {"n": False},
        {"n": [1]},
        {"n": "many"},
        {"best_of": "129"},
        {"temperature": "50"},
        {"temperature": -0.1},
        {"temperature": "nan"},
        {"temperature": "inf"},
        {"temperature": {}},
        {"top_k": MANY},
        {"top_k": str(MANY)},
        {"stream_interval": MANY},
        {"sampling_params": {"n": "129"}},
        {"sampling_params": {"temperature": 2.5}},
        {"sampling_params": {"best_of": 1e9}},
    ],
    ids=str,
)
async def test_limits_hold_for_every_json_type(client: Client, changes: dict[str, Any]) -> None:
    for path in (CHAT, "/inference/v1/generate", "/invocations"):
        answer = await client.post(path, json=ASK | changes)
        assert answer.status_code == 400
        field = next(iter(changes.get("sampling_params", changes)))
        assert field in message(answer) and " from " in message(answer)
    assert not client.server.seen


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/v1/completions", {"prompt": ["x"] * 2049}),
        ("/v1/completions", {"prompt": [[1, 2]] * 2049}),
        ("/v1/completions", {"prompt": ["x"] * 17, "n": "128"}),
        ("/v1/completions", {"prompt_embeds": ["eA=="] * 1025, "prompt": ["x"] * 1025}),
        ("/v1/chat/completions/batch", {"messages": [HELLO] * 100, "n": 64}),
        ("/generative_scoring", {"query": "x", "items": ["x"] * 3000}),
    ],
    ids=["texts", "tokens", "times n", "embeddings", "conversations", "items"],
)
async def test_a_request_may_not_ask_for_too_many_answers(client: Client, path: str, changes: dict[str, Any]) -> None:
    answer = await client.post(path, json={"model": "base"} | changes)
    assert answer.status_code == 400 and "may have 2048 in all" in message(answer)
    assert not client.server.seen


async def test_numbers_within_the_limits_pass_unchanged(client: Client) -> None:
    for changes in (
        {"n": "2", "temperature": "1.5", "top_k": -1},
        {"n": 3.0, "temperature": True, "sampling_params": {"n": 128}},
        {"n": None, "temperature": 0, "prompt": list(range(5000)), "logprobs": True},
    ):
        assert (await client.post(CHAT, json=ASK | changes)).status_code == 200
        assert json.loads(client.server.seen[-1][1]) == ASK | changes


# --- paths and names of adapters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/x" * 3000, "is no path: File name too long"),
        ("/proc/1/../x\0y", "is no path: embedded null"),
        ("/\ud800", "is no path: "),
        ("/dev/null", "has no adapter_config.json"),
        ("/dev/null/x", "has no adapter_config.json"),
    ],
    ids=["long", "nul", "surrogate", "device", "below a device"],
)
async def test_invalid_paths_are_refused(client: Client, path: str, words: str) -> None:
    body = json.dumps({"lora_name": "x", "lora_path": path}).encode()
    answer = await client.post("/v1/load_lora_adapter", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and words in message(answer)
    assert (await client.post(CHAT, json=ASK)).status_code == 200


@pytest.mark.parametrize("missing", ["stat", "access"], ids=["directory", "file"])
async def test_a_path_without_permission(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Permissions are faked, so that the test also holds for root."""
    path = adapter(tmp_path / "secret")
    found, may = Path.stat, __import__("os").access

    def stat(self: Path, **how: Any) -> Any:
        if self.parent.name == "secret":
            raise PermissionError(13, "Permission denied", str(self))
        return found(self, **how)

    if missing == "stat":
        monkeypatch.setattr(Path, "stat", stat)
    else:
        monkeypatch.setattr("os.access", lambda at, mode: Path(at).parent.name != "secret" and may(at, mode))
    answer = await load(client, path)
    assert answer.status_code == 403 and "permission denied" in message(answer)
    assert not client.server.engine.calls


@pytest.mark.parametrize("name", ["x" * 257, "a\nb", "\ud800", "\0"], ids=["long", "line", "surrogate", "nul"])
async def test_names_that_metrics_cannot_hold_are_refused(client: Client, tuned: str, name: str) -> None:
    body = json.dumps({"lora_name": name, "lora_path": tuned}).encode()
    answer = await client.post("/v1/load_lora_adapter", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and "lora_name has" in message(answer)
    assert (await client.get("/metrics")).status_code == 200


# --- the record for a server that is started again --------------------------------------------------------------------


async def test_a_full_disk_refuses_before_anything_changes(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [adapter(tmp_path / name) for name in ("one", "two")]

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    assert (await load(client, paths[0], "one")).status_code == 200
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        answer = await load(client, paths[1], "two")
    assert answer.status_code == 503
    for words in ("No space left on device", "Nothing has changed: what is served is base and one"):
        assert words in message(answer)
    assert [*client.server.engine.loaded.values()] == [paths[0]]
    assert json.loads((tmp_path / "adapter.json").read_text()) == [["one", paths[0]]]
    assert (await client.post(CHAT, json=ASK | {"model": "one"})).status_code == 200


async def test_a_record_that_cannot_be_replaced_gives_a_warning(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = adapter(tmp_path / "one")

    def readonly(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", readonly)
        answer = await load(client, path, "one")
    assert answer.status_code == 200
    for words in ("what is served is base and one", "would start the server with base"):
        assert words in answer.json()["warning"]
    assert (await client.post(CHAT, json=ASK | {"model": "one"})).status_code == 200


async def test_a_failed_change_keeps_the_record(client: Client, tmp_path: Path) -> None:
    paths = [adapter(tmp_path / name) for name in ("one", "two")]
    assert (await load(client, paths[0], "one")).status_code == 200
    client.server.engine.failure = "out of memory"
    assert (await load(client, paths[1], "two")).status_code == 400
    assert json.loads((tmp_path / "adapter.json").read_text()) == [["one", paths[0]]]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter.json", "base", "one", "two"]


# --- names and origins that a server is given -------------------------------------------------------------------------


def test_names_follow_the_address() -> None:
    from ktft.serve.front.door import names_of

    assert names_of("127.0.0.1", ()) == names_of("localhost", ()) == LOCAL_NAMES
    assert names_of("127.0.0.2", ()) == (*LOCAL_NAMES, "127.0.0.2")
    assert names_of("0.0.0.0", ()) == names_of("gpu.lan", ()) == ()
    assert names_of("0.0.0.0", ["Me.lan"]) == (*LOCAL_NAMES, "0.0.0.0", "me.lan")


@pytest.mark.parametrize(
    ("extra", "origins"),
    [
        ((), ()),
        (("--seed", "3"), ()),
        (("--allowed-origins", '["a", "b"]', "--seed", "3"), ("a", "b")),
        (('--allowed_origins=["*"]',), ("*",)),
        (('--allowed-or=["a"]', '--allowed-origins=["b"]'), ("b",)),
    ],
)
def test_origins_are_read_as_vllm_reads_them(extra: tuple[str, ...], origins: tuple[str, ...]) -> None:
    """vLLM's own parser gets ktft's argument first and the user's arguments after it."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from ktft.serve.vllm.extra_arguments import allowed_origins

    parser = make_arg_parser(FlexibleArgumentParser())
    assert tuple(parser.parse_args(["--allowed-origins", "[]", *extra]).allowed_origins) == origins
    assert allowed_origins(extra) == origins
