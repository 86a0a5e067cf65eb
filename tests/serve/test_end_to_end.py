"""From training to serving: train with llamafactory-cli, merge, serve the merged model and the adapter alone, verify.

Training and verifying run in LLaMA-Factory's environment, since vLLM's has another version of transformers.
`make test` sets `KTFT_TRAINING_BIN` to its folder of programs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import invoke, run
from conftest import Server, serving
from forked import Forks
from in_process import served
from tiny import factory_settings, write_data

TRAINING_BIN = os.environ.get("KTFT_TRAINING_BIN")
QUESTIONS = [f"add {number} and {number + 1}" for number in (0, 3, 7, 12)]
MEAN_LIMIT = 0.05  # nats: merging rounds every weight to bf16 once more

pytestmark = pytest.mark.skipif(not TRAINING_BIN, reason="KTFT_TRAINING_BIN names no training environment")


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """`training("ktft", ...)` -> what a program of the training environment prints. It must succeed."""
    folder = tmp_path_factory.mktemp("training")
    forks = Forks(folder, python=Path(TRAINING_BIN or "") / "python")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "HF_DATASETS_CACHE": str(folder / "cache")}

    def run(name: str, *arguments: str) -> str:
        out, err = folder / "out", folder / "err"
        status = forks.start([str(Path(TRAINING_BIN or "") / name), *arguments], clean | own, out, stderr=err).wait()
        assert status == 0, f"{name} {arguments}:\n{out.read_text()[-4000:]}{err.read_text()[-4000:]}"
        return out.read_text()

    yield run
    forks.close()


@pytest.fixture(scope="module")
def trained(served_checkpoint: Path, training: Callable[..., str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an `adapter` of the served checkpoint, and with the checkpoint that both are `merged` into."""
    folder = tmp_path_factory.mktemp("run")
    learning = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "max_steps": 40, "logging_steps": 10}
    data = write_data(folder / "data")
    settings = factory_settings(served_checkpoint, data, folder / "adapter", lora_rank=8, lora_alpha=16, **learning)
    (folder / "train.yaml").write_text(json.dumps(settings))  # JSON is YAML
    training("llamafactory-cli", "train", str(folder / "train.yaml"))
    status, said = run("merge", served_checkpoint, folder / "adapter", folder / "merged", "--threads", "1")
    assert status == 0, said
    return folder


@pytest.fixture
def adapted(server: Server, trained: Path) -> Iterator[str]:
    """The name of the trained adapter, which the base model's server has loaded during the test."""
    body = {"lora_name": "trained", "lora_path": str(trained / "adapter")}
    loaded = server.post("/v1/load_lora_adapter", **body)
    assert loaded.status_code == 200, loaded.text
    yield "trained"
    server.post("/v1/unload_lora_adapter", lora_name="trained").raise_for_status()


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def answers(server: Server, model: str) -> list[dict[str, Any]]:
    """The greedy answer to each question: its tokens and their log-probabilities."""
    found = []
    for question in QUESTIONS:
        body = {"model": model, "messages": asked(question), "max_tokens": 12}
        more = {"temperature": 0, "logprobs": True, "return_token_ids": True}
        answer = server.post("/v1/chat/completions", **body, **more)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        found.append({"tokens": choice["token_ids"], "logprobs": logprobs})
    return found


def answers_of(checkpoint: Path) -> list[dict[str, Any]]:
    """The same of a checkpoint that is served in this process."""
    from vllm import SamplingParams

    parameters, found = SamplingParams(temperature=0, max_tokens=12, logprobs=0), []
    with served(checkpoint, expert_format="bf16") as model:
        for question in QUESTIONS:
            (out,) = model.llm.chat(asked(question), parameters, use_tqdm=False)
            (said,) = out.outputs
            logprobs = [each[i].logprob for i, each in zip(said.token_ids, said.logprobs, strict=True)]
            found.append({"tokens": list(said.token_ids), "logprobs": logprobs})
    return found


def verify(server: Server, base: Path, trained: Path) -> list[str]:
    """The words of `ktft verify --serve` for base and adapter."""
    options = ["--adapter", str(trained / "adapter"), "--format", "bf16", "--threads", "1", "--json"]
    return ["verify", str(base), "--serve", server.url, *options]


def test_merged_and_unmerged_answer_alike(server: Server, trained: Path, adapted: str) -> None:
    one, other = answers(server, adapted), answers_of(trained / "merged")
    assert [each["tokens"] for each in one] == [each["tokens"] for each in other]
    pairs = zip(one, other, strict=True)
    differences = [abs(a - b) for x, y in pairs for a, b in zip(x["logprobs"], y["logprobs"], strict=True)]
    assert sum(differences) / len(differences) < MEAN_LIMIT


def test_the_server_has_the_model_that_was_trained(
    served_checkpoint: Path, training: Callable[..., str], trained: Path, server: Server, adapted: str
) -> None:
    """It gives the log-probabilities of the model that was trained, within the noise of bf16."""
    report = json.loads(training("ktft", *verify(server, served_checkpoint, trained), "--served-model-name", adapted))
    assert report["verdict"] == "adapter applied", report["problems"]
    assert 0.9 < report["applied"] < 1.1 and report["base"]["mean"] > 3 * report["limit"]
    assert report["tokens"] > 500 and report["continued"] > 100


@pytest.mark.full  # by default the merged model is served in the test's process, and the command serves others
def test_the_command_serves_the_merged_model(trained: Path, tmp_path: Path) -> None:
    with serving(trained / "merged", tmp_path, "--expert-format", "bf16") as (server, _):
        found = answers(server, server.name)
    assert [each["tokens"] for each in found] == [each["tokens"] for each in answers_of(trained / "merged")]


def test_an_adapter_that_is_not_applied(served_checkpoint: Path, trained: Path, server: Server) -> None:
    """In this process, whose transformers is not the one that trained."""
    done = invoke(*verify(server, served_checkpoint, trained))
    assert done.exit_code == 1 and json.loads(done.stdout)["verdict"] == "adapter NOT applied", done.output
