"""`ktft serve` with keys, and how it ends when the kernels fail."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from adapters import random_adapter
from bad_requests import COMPLETIONS
from conftest import Server, serving
from fragile import TOKEN, write_fragile
from gated import bearer


@pytest.fixture(scope="module")
def fragile(
    served_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """A server with keys. Its kernels fail for one token."""
    folder = tmp_path_factory.mktemp("fragile")
    checkpoint = write_fragile(served_checkpoint, folder / "fragile")
    keys = ["--api-key", "user", "--admin-key", "admin", "--adapter-swap", "--max-lora-rank", "8"]
    with serving(checkpoint, folder, *keys) as started:
        yield started


def test_keys(fragile: tuple[Server, subprocess.Popen[bytes]], tmp_path: Path) -> None:
    server, _ = fragile
    body = {"model": server.name, "prompt": [5, 6], "max_tokens": 2}
    for headers, code in ((bearer("user"), 200), (bearer("admin"), 200), ({"x-api-key": "user"}, 200), ({}, 401)):
        assert httpx.post(server.url + COMPLETIONS, json=body, headers=headers, timeout=300).status_code == code
    for path in ("/metrics", "/ktft/status", "/v1/models", "/version"):
        assert httpx.get(server.url + path).status_code == 401
        assert httpx.get(server.url + path, headers=bearer("user"), timeout=300).status_code == 200
    for path in ("/abort_requests", "/start_profile", "/stop_profile"):
        assert httpx.post(server.url + path).status_code == 401
        assert httpx.post(server.url + path, headers=bearer("user")).status_code == 403
    assert httpx.get(f"{server.url}/health").status_code == 200

    path = random_adapter(server.checkpoint, tmp_path / "tuned")
    load = {"lora_name": "tuned", "lora_path": str(path)}
    for headers, code in (({}, 401), (bearer("user"), 403), (bearer("admin"), 200)):
        answer = httpx.post(f"{server.url}/v1/load_lora_adapter", json=load, headers=headers, timeout=300)
        assert answer.status_code == code, answer.text
    unload = f"{server.url}/v1/unload_lora_adapter"
    assert httpx.post(unload, json={"lora_name": "tuned"}, headers=bearer("user")).status_code == 403
    assert httpx.post(unload, json={"lora_name": "tuned"}, headers=bearer("admin"), timeout=300).status_code == 200


def test_a_failure_in_the_kernels_ends_the_server(fragile: tuple[Server, subprocess.Popen[bytes]]) -> None:
    server, process = fragile
    body = {"model": server.name, "max_tokens": 2}
    sent = {"url": server.url + COMPLETIONS, "headers": bearer("user"), "timeout": 120}
    assert httpx.post(json=body | {"prompt": [5, 6]}, **sent).status_code == 200
    response = httpx.post(json=body | {"prompt": [5, TOKEN]}, **sent)
    assert response.status_code >= 500
    assert process.wait(300) == 1
    assert "the server has died" in server.log.read_text()
