"""An engine is a folder and a row. `ktft.serve.front` works with any engine; these tests give it a fake one."""

from __future__ import annotations

import asyncio
import importlib.util
import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FAKE
from gated import Engine as Client
from prometheus_client import CollectorRegistry
from transformers import AutoConfig

from ktft import versions
from ktft.checkpoint.families import FAMILIES
from ktft.serve.engine import Engine, Options, Paths
from ktft.serve.engines import ENGINES
from ktft.serve.front import asgi
from ktft.serve.front.checks import check
from ktft.serve.front.gate import Gate
from ktft.serve.front.kv_cache import kv_token_bytes
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm import families


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_rows_name_what_exists(engine: Engine) -> None:
    assert importlib.util.find_spec(f"{engine.module}.__main__")
    assert set(engine.packages) <= {"gpu", "cpu"} and set(engine.packages.values()) <= set(versions.TESTED_SERVERS)
    assert set(engine.families) <= set(FAMILIES)
    assert all(engine.install(device) for device in engine.packages)


def test_every_family_that_vllm_serves_was_measured() -> None:
    assert {*families.ROWS} <= {*FAMILIES}
    page = (Path(__file__).parents[2] / "docs/reference/serve-families.md").read_text()
    measured = set(re.findall(r"^\| (.+?) \| [\d.]+ \| [\d.]+ \|", page, re.MULTILINE))
    assert measured == {FAMILIES[model_type].name for model_type in families.SERVED}


def test_the_checks_follow_the_row(served_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, options = ServeSettings(str(served_checkpoint)), Options(kv_cache=1 << 20)
    with pytest.raises(
        ValueError, match=r"Fake is not installed in .*\. Without: pip install fake-server for the cpu$"
    ):
        check(FAKE, settings, options)
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda package: "1.5" if package == "fake-server" else real(package))
    monkeypatch.setitem(versions.TESTED_SERVERS, "fake-server", ("1.0", "2.0"))
    found = check(FAKE, settings, options)
    assert (found.engine, found.model_type, found.gpu) == (FAKE, "qwen3_moe", False)
    per_token = kv_token_bytes(AutoConfig.from_pretrained(served_checkpoint), latent=True)
    assert found.max_model_len == min((1 << 20) // per_token // FAKE.kv_block * FAKE.kv_block, 512)
    with pytest.raises(ValueError, match="which Fake was not shown to compute as in training. It serves olmoe"):
        check(replace(FAKE, families=("olmoe",)), settings, options)
    with pytest.raises(ValueError, match="need a GPU, and Fake for CPUs is installed"):
        check(FAKE, replace(settings, deferral=1), options)
    monkeypatch.setattr("ktft.device.accelerator", lambda: "a GPU")
    beside = replace(FAKE, packages={"gpu": "fake-server"})
    with pytest.raises(ValueError, match="--speculative-tokens 1 is for CPUs"):
        check(beside, replace(settings, speculative_tokens=1), options)
    assert check(beside, replace(settings, dense_format="k4"), options).gpu


def test_the_gate_follows_the_engines_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTFT_ADMIN_KEY", "admin")
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await asgi.answer_json(send, {})

    paths = Paths({"/generate": False, "/v1/completions": True}, admin=("/flush_cache",))
    settings = ServeSettings(str(tmp_path), served_name="base", adapter_swap=True)
    gate = Gate(app, lambda scope: Client(), paths, settings, CollectorRegistry())

    async def ask() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=gate), base_url="http://localhost") as client:
            asked = [
                client.post("/generate", json={"text": "x"}),
                client.post("/v1/completions", json={"prompt": "x"}),
                client.post("/v1/completions", json={"prompt": "x", "model": "base"}),
                client.post("/v1/messages", json={"model": "base"}),
                client.post("/flush_cache"),
                client.post("/flush_cache", headers={"Authorization": "Bearer admin"}),
            ]
            return [(await each).status_code for each in asked]

    assert asyncio.run(ask()) == [200, 400, 200, 404, 401, 200]
    assert seen == ["/generate", "/v1/completions", "/flush_cache"]
