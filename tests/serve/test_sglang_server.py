"""`ktft serve` with SGLang: its own HTTP server on a CPU, with adapters, and compared with training's model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import random_adapter
from commands import invoke
from conftest import Server, serving
from sglang_process import IDS, MISSING, environment, installed
from tiny import write_checkpoint

pytestmark = pytest.mark.skipif(not installed(), reason=MISSING)

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_adapter(base, tmp_path_factory.mktemp("adapter") / "tuned", std=0.3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("qwen3moe", tmp_path_factory.mktemp("base") / "tiny-moe", head_dim=32)


@pytest.fixture(scope="module")
def server(base: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--expert-format", "bf16", "--adapter", str(adapter), "--max-lora-rank", "8"]
    folder = tmp_path_factory.mktemp("server")
    with serving(base, folder, *options, environment=environment()) as (server, process):
        yield server
        process.terminate()
        assert process.wait(300) == 0, server.log.read_text()[-8000:]


def answer(server: Server, model: str, prompt: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True} | more
    response = server.post(COMPLETIONS, **body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def verify(server: Server, base: Path, adapter: Path, name: str) -> dict[str, Any]:
    options = ["--adapter", str(adapter), "--format", "bf16", "--threads", "1", "--json", "--served-model-name", name]
    done = invoke("verify", str(base), "--serve", server.url, *options)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_the_adapter_is_training_s(server: Server, base: Path, adapter: Path) -> None:
    report = verify(server, base, adapter, "tuned")
    assert report["verdict"] == "adapter applied" and 0.9 < report["applied"] < 1.1, report
    assert report["base"]["mean"] > 3 * report["limit"]


def test_the_base_is_without_it(server: Server, base: Path, adapter: Path) -> None:
    report = verify(server, base, adapter, server.name)
    assert report["verdict"] == "adapter NOT applied" and abs(report["applied"]) < 0.1, report


def test_requests_together_are_as_alone(server: Server, base: Path, tmp_path: Path) -> None:
    other = random_adapter(base, tmp_path / "other", std=0.3, seed=1)
    assert server.post("/v1/load_lora_adapter", lora_name="other", lora_path=str(other)).status_code == 200
    asked = [(name, IDS[:count]) for count in (8, 16, 24) for name in (server.name, "tuned", "other")]
    alone = [answer(server, *each)["text"] for each in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda each: answer(server, *each)["text"], asked))
    assert together == alone and len({*alone}) > 6
    listed = httpx.get(server.url + "/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in listed[1:]] == [("tuned", server.name), ("other", server.name)]
    assert server.post("/v1/unload_lora_adapter", lora_name="other").status_code == 200
    assert server.post(COMPLETIONS, model="other", prompt=IDS).status_code == 404


def test_a_name_that_is_loaded_anew_is_another_adapter(server: Server, base: Path, tmp_path: Path) -> None:
    """Neither the old tensors nor KV cache of theirs are used again."""
    texts = []
    for seed in (2, 3):
        path = random_adapter(base, tmp_path / str(seed), std=0.3, seed=seed)
        assert server.post("/v1/load_lora_adapter", lora_name="again", lora_path=str(path)).status_code == 200
        texts.append([answer(server, "again", IDS)["text"] for _ in range(2)])
    assert texts[0][0] == texts[0][1] != texts[1][0] == texts[1][1]
    assert server.post("/v1/unload_lora_adapter", lora_name="again").status_code == 200


def test_a_field_of_sglangs_own_chooses_no_adapter(server: Server) -> None:
    plain, tuned = (answer(server, name, IDS)["text"] for name in (server.name, "tuned"))
    assert answer(server, server.name, IDS, lora_path="tuned")["text"] == plain != tuned
    assert server.post(COMPLETIONS, model=f"{server.name}:tuned", prompt=IDS).status_code == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/generate"),
        ("PUT", "/generate"),
        ("GET", "/flush_cache"),
        ("GET", "/release_memory_occupation"),
        ("POST", "/load_lora_adapter"),
        ("PUT", "/set_internal_state"),
        ("GET", "/server_info"),
    ],
)
def test_paths_beside_the_gate_are_closed(server: Server, method: str, path: str) -> None:
    response = httpx.request(method, server.url + path, json={"text": "x"} if method != "GET" else None)
    assert response.status_code == 404 and "ktft serve" in response.text


def test_status_and_metrics(server: Server) -> None:
    told = httpx.get(server.url + "/ktft/status").json()
    assert told["engine"]["lanes"]["cpu"]["pairs"] > 0 and told["engine"]["expert_format"] == "bf16"
    assert "ktft_experts_packed_bytes" in httpx.get(server.url + "/metrics").text
    assert httpx.get(server.url + "/health").status_code == 200


def test_log_probabilities_of_prompts_have_their_limits(server: Server) -> None:
    given = answer(server, "tuned", IDS, logprobs=0, prompt_logprobs=0, return_tokens_as_token_ids=True)
    assert given["prompt_logprobs"][0] is None and len(given["prompt_logprobs"]) == len(IDS)
    assert all(
        each[str(token)]["logprob"] < 0 for token, each in zip(IDS[1:], given["prompt_logprobs"][1:], strict=True)
    )
    assert len(given["logprobs"]["token_logprobs"]) == 6
    for more in ({"n": 2}, {"temperature": 1}, {"prompt": "text"}, {"prompt": [5] * 1000}):
        body = {"model": "tuned", "prompt": IDS, "prompt_logprobs": 0} | more
        assert server.post(COMPLETIONS, **body).status_code == 400, more
