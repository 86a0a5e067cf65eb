"""The servers that `ktft bench serve` can start, one row each, and their processes."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.machine import not_installed
from benchmarks.process import Started, free_port
from benchmarks.serve.cases import Job
from benchmarks.serve.client import Client, ServerFailed

START_SECONDS = 1800.0
STOP_SECONDS = 20.0
KV_CACHE = 2 << 30
EXPERTS_ON_CPU = {"--n-cpu-moe", "-ncmoe", "--cpu-moe", "-cmoe"}
"""llama.cpp's options of which layers have their experts on the CPU."""
VLLM_EXTRAS = {"ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass(frozen=True)
class Row:
    """One server.

    Attributes:
        absent: gives the reason why it cannot run here; empty if it can.
        command: gives its command line for a job and a port.
        extras: fields of its requests beyond those of all servers.
        chats: whether it accepts only texts, by `/v1/chat/completions`.
        note: what its figures contain or lack compared with others'.
    """

    name: str
    absent: Callable[[Job], str]
    command: Callable[[Job, int], list[str]]
    extras: dict[str, Any] = field(default_factory=dict)
    chats: bool = False
    note: str = ""


def _ktft(job: Job, port: int) -> list[str]:
    threads = ["--threads", str(job.threads)] if job.threads else []
    code = "from ktft.cli.main import app; app()"
    return [sys.executable, "-P", "-c", code, "serve", str(job.model), "--port", str(port), *threads, *job.options]


def _vllm(job: Job, port: int) -> list[str]:
    import torch

    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(job.model)]
    # By default it takes most of a CPU's memory and does not start beside other servers.
    cache = [] if torch.cuda.is_available() else ["--kv-cache-memory-bytes", str(KV_CACHE)]
    return [*command, "--port", str(port), "--host", "127.0.0.1", "--max-model-len", str(job.length), *cache]


def _llama(job: Job, port: int) -> list[str]:
    # The slots share the context. Everything but the experts is on the GPU if there is one, and all experts are on the
    # CPU unless options say otherwise: a second of these would add to the first.
    threads = ["--threads", str(job.threads)] if job.threads else []
    own = EXPERTS_ON_CPU.intersection(job.peer_options.get("llama.cpp", ()))
    experts = [] if own else ["--n-cpu-moe", "999"]
    command = ["llama-server", "--model", str(job.gguf), "--port", str(port), *experts, "-ngl", "999"]
    return [*command, "--parallel", str(job.clients), "--ctx-size", str(job.clients * job.length), *threads]


def _llama_absent(job: Job) -> str:
    if shutil.which("llama-server") is None:
        return "llama-server is not on PATH"
    return "" if job.gguf is not None else "it needs the model as --gguf FILE"


def _transformers(job: Job, port: int) -> list[str]:
    code = "from transformers.cli.transformers import main; main()"
    return [sys.executable, "-P", "-c", code, "serve", str(job.model), "--port", str(port), "--continuous-batching"]


KTFT = Row("ktft", lambda job: not_installed("vllm"), _ktft, VLLM_EXTRAS)
PEERS = (
    Row("vllm", lambda job: not_installed("vllm"), _vllm, VLLM_EXTRAS, note="bf16 experts, on the GPU if there is one"),
    Row(
        "llama.cpp",
        _llama_absent,
        _llama,
        {"ignore_eos": True},
        note="experts on the CPU by default, in the GGUF's format",
    ),
    Row(
        "transformers",
        lambda job: not_installed("transformers.cli.serve", "fastapi", "uvicorn", "openai", "requests"),
        _transformers,
        chats=True,
        note="bf16 experts, on the GPU if there is one; stops at an end token",
    ),
)
ROWS = {row.name: row for row in (KTFT, *PEERS)}


class Process(Started):
    """A server of `row`.

    Args:
        row, job: the server to start and its settings.
        text: see `Client`, for servers that accept only chats.

    Raises:
        ServerFailed: the server ended or did not answer in time; the message has its last lines.
    """

    def __init__(self, row: Row, job: Job, text: Callable[[list[int]], str]) -> None:
        self.row = row
        port = free_port()
        self.client = Client(f"http://127.0.0.1:{port}", row.extras, text if row.chats else None)
        super().__init__([*row.command(job, port), *job.peer_options.get(row.name, ())])
        try:
            self._wait()
            self.client.find_model(str(job.model) if row.chats else None)
        except BaseException:
            self.close()
            raise

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerFailed(f"{self.row.name} ended with {self._process.returncode}: {self.last_lines()}")
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.client.url}/health", timeout=5).status_code == 200:
                    return
            time.sleep(0.5)
        raise ServerFailed(f"{self.row.name} does not answer after {START_SECONDS:.0f} s: {self.last_lines()}")

    def close(self) -> None:
        """End the server with SIGTERM first and SIGKILL after some seconds."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        super().close()


def running(url: str, model: str | None) -> Client:
    """A client of a server that somebody else started. Raises ServerFailed if nobody answers there."""
    client = Client(url.rstrip("/").removesuffix("/v1"), VLLM_EXTRAS)
    client.find_model(model)
    return client
