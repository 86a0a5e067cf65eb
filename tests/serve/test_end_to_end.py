"""From training to serving: train with llamafactory-cli, merge, serve the merged model and the adapter alone, verify.

Training, merging and verifying run in LLaMA-Factory's environment, since vLLM's has another version of transformers.
`make test` sets `KTFT_TRAINING_BIN` to its folder of programs.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Server, serving
from tiny import factory_settings, write_data

TRAINING_BIN = os.environ.get("KTFT_TRAINING_BIN")
QUESTIONS = [f"add {number} and {number + 1}" for number in (0, 3, 7, 12)]
MEAN_LIMIT = 0.05  # nats: merging rounds every weight to bf16 once more

pytestmark = pytest.mark.skipif(not TRAINING_BIN, reason="KTFT_TRAINING_BIN names no training environment")


def training(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the training environment."""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = [str(Path(TRAINING_BIN or "") / command[0]), *command[1:]]
    return subprocess.run(program, env=clean | own, capture_output=True, text=True, timeout=300)


def succeed(*command: str, **environment: str) -> str:
    done = training(*command, **environment)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def trained(served_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an `adapter` of the served checkpoint, and with the checkpoint that both are `merged` into."""
    folder = tmp_path_factory.mktemp("run")
    learning = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "max_steps": 40, "logging_steps": 10}
    data = write_data(folder / "data")
    settings = factory_settings(served_checkpoint, data, folder / "adapter", lora_rank=8, lora_alpha=16, **learning)
    (folder / "train.yaml").write_text(json.dumps(settings))  # JSON is YAML
    succeed("llamafactory-cli", "train", str(folder / "train.yaml"), HF_DATASETS_CACHE=str(folder / "cache"))
    places = map(str, (served_checkpoint, folder / "adapter", folder / "merged"))
    succeed("ktft", "merge", *places, "--threads", "1")
    return folder


@pytest.fixture(scope="module")
def merged_server(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`ktft serve` of the merged model."""
    with serving(trained / "merged", tmp_path_factory.mktemp("server"), "--expert-format", "bf16") as (server, _):
        yield server


@pytest.fixture
def adapted(server: Server, trained: Path) -> Iterator[str]:
    """The name of the trained adapter, which the base model's server has loaded during the test."""
    body = {"lora_name": "trained", "lora_path": str(trained / "adapter")}
    loaded = server.post("/v1/load_lora_adapter", **body)
    assert loaded.status_code == 200, loaded.text
    yield "trained"
    server.post("/v1/unload_lora_adapter", lora_name="trained").raise_for_status()


def answers(server: Server, model: str) -> list[dict[str, Any]]:
    """The greedy answer to each question: its tokens and their log-probabilities."""
    found = []
    for question in QUESTIONS:
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 12}
        more = {"temperature": 0, "logprobs": True, "return_token_ids": True}
        answer = server.post("/v1/chat/completions", **body, **more)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        found.append({"tokens": choice["token_ids"], "logprobs": logprobs})
    return found


def verify(server: Server, base: Path, trained: Path) -> tuple[int, dict[str, Any]]:
    """Run `ktft verify --serve` with base and adapter in the training environment."""
    options = ["--adapter", str(trained / "adapter"), "--format", "bf16", "--threads", "1", "--json"]
    done = training("ktft", "verify", str(base), "--serve", server.url, *options)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_merged_and_unmerged_answer_alike(trained: Path, server: Server, merged_server: Server, adapted: str) -> None:
    unmerged, merged = answers(server, adapted), answers(merged_server, "merged")
    assert [each["tokens"] for each in unmerged] == [each["tokens"] for each in merged]
    differences = [
        abs(a - b)
        for one, other in zip(unmerged, merged, strict=True)
        for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    ]
    assert sum(differences) / len(differences) < MEAN_LIMIT


def test_both_are_the_model_that_was_trained(
    served_checkpoint: Path, trained: Path, server: Server, merged_server: Server, adapted: str
) -> None:
    """Both give the log-probabilities of the model that was trained, within the noise of bf16."""
    for each in (server, merged_server):
        status, report = verify(each, served_checkpoint, trained)
        assert status == 0 and report["verdict"] == "adapter applied", report["problems"]
        assert 0.9 < report["applied"] < 1.1 and report["base"]["mean"] > 3 * report["limit"]
        assert report["tokens"] > 500 and report["continued"] > 100


def test_an_adapter_that_is_not_applied(served_checkpoint: Path, trained: Path, server: Server) -> None:
    status, report = verify(server, served_checkpoint, trained)
    assert status == 1 and report["verdict"] == "adapter NOT applied", report
