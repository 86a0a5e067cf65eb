"""The gate with several adapters: they come and go while requests of others, and of the base, are in flight."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from gated import (
    CHAT,
    HELLO,
    Response,
    Serve,
    Server,
    adapter,
    anyio_backend,
    ask,
    done,
    load,
    request,
    serve,
    settle,
    unload,
)

__all__ = ["anyio_backend", "serve"]

pytestmark = pytest.mark.anyio


@pytest.fixture
def server(serve: Serve) -> Server:
    return serve()


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    return {name: adapter(tmp_path / name) for name in ("one", "two", "three")}


def begin(server: Server, model: str) -> tuple[asyncio.Task[None], Response]:
    """Start a request that computes until `server.go` is set."""
    return request(server, CHAT, {"model": model, "messages": HELLO})


def said(path: str | None) -> bytes:
    return f"{path} ".encode() * 3


async def test_base_and_adapters_are_served_beside_each_other(
    server: Server, paths: dict[str, str], tmp_path: Path
) -> None:
    for name, path in paths.items():
        answer = await load(server, path, name)
        assert (answer.status, json.loads(answer.body)["model"]) == (200, name)
    for name, path in {"base": None, **paths}.items():
        assert (await ask(server, name)).body == said(path)
    refused = await ask(server, "four")
    assert refused.status == 404
    assert "'four' is not served; what is served is base, one, two and three" in refused.error["message"]
    assert server.engine.calls == [f"add {path}" for path in paths.values()]  # no prefixes are dropped
    models = json.loads((await done(server, "/v1/models")).body)["data"]
    assert [(each["id"], each["parent"], each.get("root")) for each in models[1:]] == [
        (name, "base", path) for name, path in paths.items()
    ]
    assert json.loads((tmp_path / "adapter.json").read_text()) == [[name, path] for name, path in paths.items()]

    assert json.loads((await unload(server, "two")).body)["model"] == "base"
    assert (await ask(server, "two")).status == 404 == (await unload(server, "two")).status
    assert (await ask(server, "three")).body == said(paths["three"])
    assert sorted(server.engine.loaded.values()) == sorted((paths["one"], paths["three"]))
    assert server.gate.adapters.changes == 4


async def test_adapters_given_at_the_start(serve: Serve, paths: dict[str, str]) -> None:
    server = serve(adapters=tuple(paths.items()))
    models = json.loads((await done(server, "/v1/models")).body)["data"]
    assert [each["id"] for each in models[1:]] == list(paths)
    server = serve(adapters=tuple(paths.items()))
    assert (await ask(server, "two")).body == said(paths["two"])
    assert (await ask(server, "base")).body == said(None)


async def test_a_load_waits_for_nobody(server: Server, paths: dict[str, str]) -> None:
    server.go.clear()
    running = [begin(server, "base")]
    await settle()
    assert (await load(server, paths["one"], "one")).status == 200
    running.append(begin(server, "one"))
    await settle()
    assert (await load(server, paths["two"], "two")).status == 200
    assert server.gate.admission.in_flight == 2 and not server.gate.admission.waiting
    server.go.set()
    await asyncio.gather(*(task for task, _ in running))
    assert [answer.body for _, answer in running] == [said(None), said(paths["one"])]


async def test_an_unload_waits_for_the_requests_of_its_adapter_alone(server: Server, paths: dict[str, str]) -> None:
    await load(server, paths["one"], "one")
    await load(server, paths["two"], "two")
    server.go.clear()
    mine, other = begin(server, "one"), begin(server, "two")
    await settle()
    unloading = asyncio.ensure_future(unload(server, "one"))
    await settle()
    late, base = begin(server, "one"), begin(server, "base")
    await settle()
    assert not unloading.done() and paths["one"] in server.engine.loaded.values()
    assert (base[1].status, late[1].status, server.gate.admission.waiting) == (200, 0, 1)
    server.go.set()
    await asyncio.gather(unloading, *(task for task, _ in (mine, other, late, base)))
    assert (mine[1].body, other[1].body, base[1].body) == (said(paths["one"]), said(paths["two"]), said(None))
    assert unloading.result().status == 200 and late[1].status == 404
    assert not server.gate.admission.in_flight and not server.gate.admission._rooms


async def test_another_adapter_under_the_same_name(server: Server, paths: dict[str, str], tmp_path: Path) -> None:
    """It gets a new number, by which engines keep prefixes apart, and waits for the requests of the one before."""
    await load(server, paths["one"], "mine")
    before = server.engine.announced["mine"]
    server.go.clear()
    old = begin(server, "mine")
    await settle()
    loading = asyncio.ensure_future(load(server, paths["two"], "mine"))
    await settle()
    new = begin(server, "mine")
    await settle()
    assert not loading.done()
    server.go.set()
    await asyncio.gather(loading, old[0], new[0])
    assert (old[1].body, new[1].body) == (said(paths["one"]), said(paths["two"]))
    assert server.engine.announced["mine"][0] > before[0]
    assert list(server.engine.loaded.values()) == [paths["two"]]
    assert json.loads((tmp_path / "adapter.json").read_text()) == [["mine", paths["two"]]]
    again = await load(server, paths["two"], "mine")  # its files may have changed
    assert again.status == 200 and server.engine.announced["mine"][0] == 3


async def test_a_change_that_waits_too_long_changes_nothing(serve: Serve, paths: dict[str, str]) -> None:
    server = serve(swap_timeout=0.2)
    await load(server, paths["one"], "one")
    server.go.clear()
    stream, _ = begin(server, "one")
    await settle()
    for answer in (await unload(server, "one"), await load(server, paths["two"], "one")):
        assert answer.status == 503 and "in flight" in answer.error["message"]
    assert list(server.engine.loaded.values()) == [paths["one"]]
    server.go.set()
    await stream
    assert (await ask(server, "one")).body == said(paths["one"])


async def test_too_many_adapters(serve: Serve, paths: dict[str, str]) -> None:
    server = serve(max_adapters=2)
    await load(server, paths["one"], "one")
    await load(server, paths["two"], "two")
    refused = await load(server, paths["three"], "three")
    assert refused.status == 400
    assert "room for 2 adapters, which one and two take; unload one" in refused.error["message"]
    assert "--max-adapters 3" in refused.error["message"]
    assert (await load(server, paths["three"], "two")).status == 200  # in place of another
    assert (await unload(server, "one")).status == 200
    assert (await load(server, paths["one"], "three")).status == 200


async def test_a_failed_load_leaves_the_others(server: Server, paths: dict[str, str], tmp_path: Path) -> None:
    await load(server, paths["one"], "one")
    server.engine.failure = "lora_A of layer 3 is [4, 64], rank is 8"
    for name in ("one", "two"):
        answer = await load(server, paths["two"], name)
        assert (answer.status, answer.error["message"]) == (400, server.engine.failure)
    assert (await ask(server, "one")).body == said(paths["one"])
    assert (await ask(server, "two")).status == 404
    assert json.loads((tmp_path / "adapter.json").read_text()) == [["one", paths["one"]]]


async def test_a_full_disk_refuses_before_anything_changes(
    server: Server, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    await load(server, paths["one"], "one")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        for answer in (await load(server, paths["two"], "two"), await unload(server, "one")):
            assert answer.status == 503
            words = "No space left on device. Nothing has changed: what is served is base and one"
            assert words in answer.error["message"]
    assert list(server.engine.loaded.values()) == [paths["one"]]
    assert (await ask(server, "one")).status == 200


async def test_the_name_of_a_part_of_messages_is_refused(server: Server, paths: dict[str, str]) -> None:
    """vLLM would compute the base's requests that have such a part by the adapter."""
    answer = await load(server, paths["one"], "text")
    assert answer.status == 400 and "takes for something else" in answer.error["message"]


async def test_a_server_without_room(serve: Serve, paths: dict[str, str]) -> None:
    answer = await load(serve(adapter_swap=False), paths["one"])
    assert answer.status == 400 and "start it with --adapter-swap" in answer.error["message"]


async def test_adapters_come_and_go_under_load(server: Server, paths: dict[str, str]) -> None:
    """Two names stand for one adapter after another. No answer mixes two, or is by one of another name."""
    counts = {200: 0, 404: 0}
    current: dict[str, str] = {}
    stands_for: dict[str, set[str]] = {"a": set(), "b": set()}

    async def client(name: str) -> None:
        for _ in range(80):
            answer = await ask(server, name)
            counts[answer.status] += 1
            if answer.status == 200:
                assert answer.body in {said(path) for path in (stands_for[name] if name != "base" else {None})}
            await asyncio.sleep(0)

    async def changer(name: str, order: list[str]) -> None:
        for path in order * 8:
            if name in current and path == "":
                assert (await unload(server, name)).status == 200
                del current[name]
            elif path:
                stands_for[name].add(path)
                assert (await load(server, path, name)).status == 200
                current[name] = path
            await asyncio.sleep(0)

    one, two, three = paths.values()
    clients = [client(name) for name in ("a", "b", "base") * 3]
    await asyncio.gather(changer("a", [one, two, ""]), changer("b", [three, ""]), *clients)
    assert min(counts.values()) > 20
    assert len(server.engine.loaded) == len(server.gate.adapters.loaded)
