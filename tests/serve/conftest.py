"""Fixtures of serving: a tiny checkpoint whose attention vLLM's CPU backend takes, and one server for all tests."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny import write_checkpoint

from ktft.serve.settings import ServeSettings, cpu_environment

# LLaMA-Factory's environment has no vLLM: `make test` runs these tests in one that has, by the name of this folder.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*"]

STARTS_WITHIN = 240  # seconds; on an idle machine it is 30


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Attributes:
        url: without a path.
        checkpoint: it serves, as `name`.
        log: all that its processes printed.
    """

    url: str
    name: str
    checkpoint: Path
    log: Path

    def post(self, path: str, **body: Any) -> httpx.Response:
        """One request, its body JSON."""
        return httpx.post(self.url + path, json=body, timeout=120)


@pytest.fixture(scope="session")
def served_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE, plain bf16. Copy it before changing it."""
    return write_checkpoint("qwen3moe", tmp_path_factory.mktemp("served") / "tiny-moe", head_dim=32)


@pytest.fixture(scope="session")
def server(served_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`served_checkpoint` with experts in bf16, served by vLLM."""
    folder = tmp_path_factory.mktemp("server")
    settings = ServeSettings(
        str(served_checkpoint), expert_format="bf16", threads=1, status_path=str(folder / "status.json")
    )
    name, port = served_checkpoint.name, _free_port()
    command = [sys.executable, "-m", "ktft.serve.engine", "--model", str(served_checkpoint)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--quantization", "ktft", "--load-format", "ktft", "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--max-model-len", "256", "--max-num-seqs", "8"]
    environment = os.environ | settings.to_env() | cpu_environment(settings) | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    log = folder / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/health", log)
        yield Server(f"http://127.0.0.1:{port}", name, served_checkpoint, log)
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            _kill_group(process.pid)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < end:
        if process.poll() is not None:
            pytest.fail(f"the server exited with {process.returncode}:\n{log.read_text()[-8000:]}")
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.3)
    pytest.fail(f"the server was not ready in {STARTS_WITHIN} s:\n{log.read_text()[-8000:]}")


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
