"""Fixtures for tests of serving: a tiny checkpoint that vLLM can run on a CPU, and one server for all tests."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

# LLaMA-Factory's environment has no vLLM: `make test` runs these tests in one that has, by the name of this folder. One
# that has SGLang instead runs SGLang's.
HERE = Path(__file__).parent
_OF_SGLANG = {file.name for file in HERE.glob("test_sglang*.py")} if importlib.util.find_spec("sglang") else set()
collect_ignore_glob = (
    [] if importlib.util.find_spec("vllm") else [file.name for file in HERE.iterdir() if file.name not in _OF_SGLANG]
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each file runs in one worker. All of `WITH_SERVER` share a worker, since each worker would start a server."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "server" if file.endswith(WITH_SERVER) else file

    return Scheduling(config, log)


WITH_SERVER = ("test_end_to_end.py", "test_serve_engine.py", "test_serve_http.py")
"""The files whose tests use `server`."""
STARTS_WITHIN = 600  # seconds; on an idle machine it is 30


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: without a path.
        checkpoint: what it serves, under `name`.
        log: everything that its processes printed.
        key: what requests must give.
    """

    url: str
    name: str
    checkpoint: Path
    log: Path
    key: str | None = None

    def post(self, path: str, **body: Any) -> httpx.Response:
        """Send one request with a JSON body."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=300)


@pytest.fixture(scope="session")
def served_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-MoE in plain bf16, with heads that vLLM takes on a CPU. Copy it before changing it."""
    from tiny import write_checkpoint

    return write_checkpoint("qwen3moe", tmp_path_factory.mktemp("served") / "tiny-moe", head_dim=32)


@pytest.fixture(scope="session")
def server(served_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`ktft serve` of `served_checkpoint`, with bf16 experts and room for an adapter."""
    options = ["--expert-format", "bf16", "--adapter-swap", "--max-lora-rank", "8"]
    with serving(served_checkpoint, tmp_path_factory.mktemp("server"), *options) as (server, process):
        yield server
        process.terminate()
        assert process.wait(300) == 0, server.log.read_text()[-8000:]


# Random weights would fill a structured answer with endless white space
OF_VLLM = ("--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}')


@contextmanager
def serving(
    checkpoint: Path, folder: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """Run `ktft serve` with these options until the block ends, even by an error.

    It serves with vLLM, unless an environment for another engine is given.
    """
    port, log = _free_port(), folder / "log.txt"
    command = [str(Path(sys.executable).with_name("ktft")), "serve", str(checkpoint), "--port", str(port), "--verbose"]
    command += ["--threads", "1", "--max-model-len", "256", "--max-num-seqs", "8", *options]
    if environment is None:
        command += ["--", *OF_VLLM]
    # Of what is left, vLLM would compile its count of logprobs alone, for half a minute of two cores
    environment = os.environ | {"TORCH_COMPILE_DISABLE": "1"} | dict(environment or {})
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        _wait(process, log)
        yield Server(f"http://127.0.0.1:{port}", checkpoint.name, checkpoint, log), process
    finally:
        process.kill()  # its engine ends too
        process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + STARTS_WITHIN
    while "serving " not in (said := log.read_text(errors="replace")) or "Ctrl-C ends it" not in said:
        if process.poll() is not None:
            pytest.fail(f"the server exited with {process.returncode}:\n{said[-8000:]}")
        if time.monotonic() > end:
            pytest.fail(f"the server was not ready in {STARTS_WITHIN} s:\n{said[-8000:]}")
        time.sleep(0.3)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
