"""What a user does: trains with llamafactory-cli, merges, serves the merged model and the adapter unmerged, verifies.

Training, merging and verifying run in LLaMA-Factory's environment, whose programs are in `KTFT_TRAINING_BIN` (`make
test` sets it): it has another transformers than vLLM's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapters import random_adapter
from tiny import write_checkpoint, write_data

TRAINING_BIN = os.environ.get("KTFT_TRAINING_BIN")
QUESTIONS = [f"add {number} and {number + 1}" for number in (0, 3, 7, 12)]
STARTS_WITHIN, ENDS_WITHIN = 300, 60  # seconds
MEAN_LIMIT = 0.05  # nats: merging rounds every weight to bf16 once more

pytestmark = pytest.mark.skipif(not TRAINING_BIN, reason="KTFT_TRAINING_BIN names no training environment")


def training(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program of the training environment."""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    program = [str(Path(TRAINING_BIN or "") / command[0]), *command[1:]]
    return subprocess.run(program, env=clean | own, capture_output=True, text=True, timeout=300)


def succeed(*command: str, **environment: str) -> str:
    done = training(*command, **environment)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@dataclass(frozen=True)
class Trained:
    """Directories of a run."""

    base: Path
    adapter: Path
    merged: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("run")
    found = Trained(folder / "base", folder / "adapter", folder / "merged")
    write_checkpoint("qwen3moe", found.base, head_dim=32)
    settings = {
        "model_name_or_path": str(found.base),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_target": "all",
        "lora_rank": 8,
        "lora_alpha": 16,
        "use_kt": True,
        "kt_config": {"expert_format": "bf16", "threads": 1},
        "dataset_dir": str(write_data(folder / "data")),
        "dataset": "sft",
        "template": "default",
        "cutoff_len": 64,
        "output_dir": str(found.adapter),
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "max_steps": 40,
        "logging_steps": 10,
        "report_to": "none",
        "use_cpu": True,
    }
    (folder / "train.yaml").write_text(json.dumps(settings))  # JSON is YAML
    succeed("llamafactory-cli", "train", str(folder / "train.yaml"), HF_DATASETS_CACHE=str(folder / "cache"))
    succeed("ktft", "merge", str(found.base), str(found.adapter), str(found.merged), "--threads", "1")
    return found


@contextmanager
def serving(log: Path, *arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """`ktft serve` of this environment; it must end with 0 when it is told to."""
    command = [str(Path(sys.executable).parent / "ktft"), "serve", *map(str, arguments)]
    command += ["--expert-format", "bf16", "--threads", "1", "--max-model-len", "256", "--kv-cache-memory", "64M"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
        process.terminate()
        assert process.wait(ENDS_WITHIN) == 0, log.read_text()[-4000:]
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(ENDS_WITHIN)


def wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.3)
    pytest.fail(f"not ready in {STARTS_WITHIN} s:\n{log.read_text()[-4000:]}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def urls(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Where `unmerged` (base and adapter) and `merged` are served; they start together."""
    logs = tmp_path_factory.mktemp("logs")
    models = {"unmerged": (trained.base, "--adapter", trained.adapter), "merged": (trained.merged,)}
    with ExitStack() as stack:
        started = {}
        for name, arguments in models.items():
            port, log = free_port(), logs / f"{name}.log"
            process = stack.enter_context(serving(log, *arguments, "--port", str(port)))
            started[name] = (process, f"http://127.0.0.1:{port}", log)
        for each in started.values():
            wait(*each)
        yield {name: url for name, (_, url, _) in started.items()}


def answers(url: str, model: str) -> list[dict[str, Any]]:
    """Each question's greedy answer: its text, tokens and their log-probabilities."""
    found = []
    for question in QUESTIONS:
        body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 12}
        more = {"temperature": 0, "logprobs": True, "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body | more, timeout=120)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
        found.append({"text": choice["message"]["content"], "tokens": choice["token_ids"], "logprobs": logprobs})
    return found


def test_merged_and_unmerged_answer_alike(trained: Trained, urls: dict[str, str]) -> None:
    unmerged = answers(urls["unmerged"], trained.adapter.name)
    merged = answers(urls["merged"], trained.merged.name)
    assert [each["tokens"] for each in unmerged] == [each["tokens"] for each in merged]
    differences = [
        abs(a - b)
        for one, other in zip(unmerged, merged, strict=True)
        for a, b in zip(one["logprobs"], other["logprobs"], strict=True)
    ]
    assert sum(differences) / len(differences) < MEAN_LIMIT


@pytest.mark.parametrize("served", ["unmerged", "merged"])
def test_the_server_is_the_trained_model(trained: Trained, urls: dict[str, str], served: str) -> None:
    """Log-probabilities of training's model, base and adapter, within the noise of bf16."""
    report = verify(urls[served], trained.base, "--adapter", trained.adapter)
    assert report["passed"] and report["verdict"] == "adapter applied"
    assert 0.9 < report["applied"] < 1.1 and report["base"]["mean"] > 3 * report["limit"]
    assert report["tokens"] > 500 and report["continued"] > 100


def verify(url: str, model: Path, *options: str | Path) -> dict[str, Any]:
    """`ktft verify --serve`, in the training environment."""
    command = ["verify", str(model), "--serve", url, "--format", "bf16", "--threads", "1", "--json"]
    done = training("ktft", *command, *map(str, options))
    assert done.returncode in (0, 1), done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["passed"] == (done.returncode == 0)
    return report


def test_another_adapter_and_none(trained: Trained, urls: dict[str, str], tmp_path: Path) -> None:
    """The server changes its adapter; what verify says of the trained one follows."""
    url = urls["unmerged"]
    other = random_adapter(trained.base, tmp_path / "other", 0.3)
    loaded = httpx.post(f"{url}/v1/load_lora_adapter", json={"lora_name": "other", "lora_path": str(other)}, timeout=60)
    assert loaded.status_code == 200, loaded.text
    report = verify(url, trained.base, "--adapter", trained.adapter)
    assert report["verdict"] == "off" and report["model"] == "other"
    httpx.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": "other"}, timeout=60).raise_for_status()
    report = verify(url, trained.base, "--adapter", trained.adapter)
    assert report["verdict"] == "adapter NOT applied" and "adapter NOT applied" in report["problems"][0]
    assert verify(url, trained.base)["verdict"] == "the same model"
