"""Starting a server, waiting until it serves, ending it, starting it again: the parent's side of `ktft serve`.

vLLM runs in a process group of its own (`ktft.serve.vllm.engine`); nothing here imports it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktft import config
from ktft.serve.front.adapter_record import AdapterRecord
from ktft.serve.front.checks import Findings, Options
from ktft.serve.front.door import names_of
from ktft.serve.front.processes import end_group
from ktft.serve.runtime.progress import Progress, read_progress
from ktft.serve.runtime.settings import ServeSettings, cpu_environment
from ktft.serve.vllm.arguments import allowed_origins
from ktft.serve.vllm.families import CONFIG_OVERRIDES, compilation_config

ENGINE = ("-P", "-m", "ktft.serve.vllm.engine")  # -P: a file of the working directory must not shadow a package
DRAIN = 15  # seconds that requests in flight have when the server is told to end
QUICK, TRIES = 300.0, 5  # a server that ran for fewer seconds has crashed quickly; give up after so many in a row
_POLL = 0.1
_SHOWN = 15  # lines of the log
# Of Triton's bindings, dozens of lines after whatever went wrong
_LEAKS = re.compile(r"nanobind: | - leaked |See https://nanobind| - \.\.\. skipped remainder")
_CAUSE = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+|error: argument .+)$")

_HERMES, _QWEN3_XML = ("hermes", ""), ("qwen3_xml", "<tool_call>")
TOOL_PARSERS = {
    "qwen2_moe": _HERMES,
    "qwen3_moe": _HERMES,
    "qwen3_next": _HERMES,
    "qwen3_vl_moe": _HERMES,
    "qwen3_5_moe": _QWEN3_XML,
    "qwen3_5_moe_text": _QWEN3_XML,
    "deepseek_v3": ("deepseek_v3", "<｜tool▁calls▁begin｜>"),  # noqa: RUF001
    "kimi_k2": ("kimi_k2", "<|tool_calls_section_begin|>"),
    "glm4_moe": ("glm45", "<tool_call>"),
    "glm_moe_dsa": ("glm47", "<tool_call>"),
    "minimax_m2": ("minimax_m2", "<minimax:tool_call>"),
    "gpt_oss": ("openai", "<|call|>"),
    "ernie4_5_moe": ("ernie45", "<tool_call>"),
}
"""model_type -> vLLM's parser of the tool calls that released models of that type write, and a token without which it
would refuse every chat."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")

_CPU = ("--enforce-eager",)  # what torch.compile gains there is small beside the experts, and takes a minute of start


class Failed(Exception):
    """The server could not start, or has died. `lines` are the end of its log."""

    def __init__(self, message: str, lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lines = tuple(lines)


def arguments(settings: ServeSettings, options: Options, found: Findings) -> list[str]:
    """Of vLLM's server. Its user's own come last, so that they win."""
    served = settings.served_adapter
    given = {
        "--model": settings.checkpoint,
        "--served-model-name": served[0] if served else settings.base_name,
        "--host": options.host,
        "--port": options.port,
        "--quantization": "ktft",
        "--load-format": "ktft",
        "--worker-extension-cls": "ktft.serve.vllm.worker.KtftWorker",
        "--middleware": "ktft.serve.front.gate.Gate",
        "--max-num-seqs": options.max_num_seqs,
        "--max-model-len": found.max_model_len,
        "--kv-cache-memory-bytes": found.kv_cache,
        "--allowed-origins": "[]",  # all, by vLLM 0.24's default
        "--shutdown-timeout": DRAIN,
        "--tool-call-parser": _tool_parser(Path(settings.checkpoint), found.model_type),
        "--hf-overrides": _json(CONFIG_OVERRIDES.get(found.model_type)),
        "--compilation-config": _json(compilation_config(found.model_type, found.gpu, options.max_num_seqs)),
    }
    words = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
    if given["--tool-call-parser"]:
        words.append("--enable-auto-tool-choice")
    words.append("--disable-uvicorn-access-log")
    return [*words, *(() if found.gpu else _CPU), *options.extra]


def _tool_parser(checkpoint: Path, model_type: str) -> str | None:
    """The parser for a model whose tokenizer has its token; none for other models."""
    parser, token = TOOL_PARSERS.get(model_type, (None, ""))
    files = [checkpoint / name for name in _TOKENIZERS]
    known = not token or any(token.encode() in file.read_bytes() for file in files if file.is_file())
    return parser if known else None


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def environment(settings: ServeSettings, options: Options, found: Findings) -> dict[str, str]:
    """Of vLLM's server: this process's, with what ktft and vLLM are told by it."""
    own = {"PYTHONUNBUFFERED": "1", "VLLM_NO_USAGE_STATS": "1"} | dict(os.environ) | settings.to_env()
    own |= {"VLLM_API_KEY": options.api_key or "", config.ADMIN_KEY_ENV: options.admin_key or ""}
    if not found.gpu:
        own |= cpu_environment(settings)
        # its latent attention on the CPU ends the engine where the latent vector is not 512 long
        own.setdefault("VLLM_MLA_DISABLE", "1")
        own.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the argument
    return own


def url(options: Options) -> str:
    """Where a client on this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    return f"http://[{host}]:{options.port}" if ":" in host else f"http://{host}:{options.port}"


@dataclass(frozen=True)
class Place:
    """Where a server's files are: how far it is, the adapter that was loaded last, its log."""

    directory: Path

    @property
    def status(self) -> Path:
        """See `ktft.serve.runtime.progress`."""
        return self.directory / "status.json"

    @property
    def log(self) -> Path:
        """What vLLM says."""
        return self.directory / "server.log"


class Server:
    """One start of a server.

    Args:
        settings, options, found: what to start.
        place: for its files.
        verbose: its log goes to this process's standard error, not to a file.
    """

    def __init__(
        self, settings: ServeSettings, options: Options, found: Findings, place: Place, verbose: bool = False
    ) -> None:
        self.options, self.place, self.verbose = options, place, verbose
        settings = replace(
            settings,
            status_path=str(place.status),
            hosts=names_of(options.host, options.allowed_hosts),
            origins=allowed_origins(options.extra),
            parent=os.getpid(),
        )
        place.status.unlink(missing_ok=True)
        command = [sys.executable, *ENGINE, *arguments(settings, options, found)]
        with place.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment(settings, options, found),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if verbose else log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C is for the parent alone
            )
        self._began = time.monotonic()

    @property
    def running_for(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    def wait_ready(self, stop: threading.Event, report: Callable[[Progress], None]) -> bool:
        """Wait until it answers. False if `stop` came first.

        Args:
            report: called with how far it is.

        Raises:
            Failed: it ended before.
        """
        while not stop.wait(_POLL):
            self.require_alive("could not start")
            progress = read_progress(self.place.status)
            if progress is None:
                report(Progress("Starting vLLM"))
            elif progress.error is None:
                report(progress)
            if _healthy(self.options):
                return True
        return False

    def wait(self, stop: threading.Event) -> None:
        """Return once `stop` came.

        Raises:
            Failed: it died before.
        """
        while not stop.wait(_POLL):
            self.require_alive("has died")

    def require_alive(self, what: str) -> None:
        """Raise `Failed` if it has ended. vLLM ends with 0 even when its engine has died."""
        if (code := self._process.poll()) is not None:
            said = [] if self.verbose else [line for line in self._log() if not _LEAKS.match(line)]
            raise Failed(f"the server {what}: {self._reason(code)}", said[-_SHOWN:])

    def _reason(self, code: int) -> str:
        progress = read_progress(self.place.status)
        if progress is not None and progress.error:
            return progress.error
        if code < 0:
            hint = " (was it out of memory? dmesg tells)" if code == -signal.SIGKILL else ""
            return f"killed by {signal.Signals(-code).name}{hint}"
        causes = [match[1] for line in self._log() if (match := _CAUSE.search(line))]
        return causes[0] if causes else f"vLLM ended with exit code {code}"

    def _log(self) -> list[str]:
        return self.place.log.read_text(errors="replace").splitlines() if self.place.log.is_file() else []

    def end(self, hurry: threading.Event) -> None:
        """Let requests in flight finish for `DRAIN` seconds, then end what is left; at once if `hurry` is set."""
        if self._process.poll() is None:
            self._process.terminate()
            deadline = time.monotonic() + DRAIN + 10
            while self._process.poll() is None and not hurry.wait(_POLL) and time.monotonic() < deadline:
                pass
        end_group(self._process.pid, 1.0 if hurry.is_set() else 5.0)
        self._process.wait()


def _healthy(options: Options) -> bool:
    host, _, port = url(options).removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class Signals:
    """The first SIGINT or SIGTERM sets `stop`, a second one `hurry`. For the main thread, as a context manager."""

    NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.stop, self.hurry = threading.Event(), threading.Event()

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._handle) for number in self.NUMBERS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, *_: object) -> None:
        (self.hurry if self.stop.is_set() else self.stop).set()


def last_adapter(settings: ServeSettings, place: Place) -> ServeSettings:
    """The settings with the adapter that was loaded last.

    Raises:
        ValueError: its directory is gone, or nothing says any more which one it was.
    """
    name, path = _record(settings, place).read() or (None, None)
    return replace(settings, adapter=path, adapter_name=name)


def _record(settings: ServeSettings, place: Place) -> AdapterRecord:
    return AdapterRecord(replace(settings, status_path=str(place.status)).adapter_file)


@dataclass(frozen=True)
class Watcher:
    """What is called while a server runs.

    Attributes:
        loading: with how far loading is.
        ready: with the settings that are served.
        crashed: with what happened and the seconds until the next start.
    """

    loading: Callable[[Progress], None]
    ready: Callable[[ServeSettings], None]
    crashed: Callable[[Failed, float], None]


def run(
    settings: ServeSettings,
    options: Options,
    found: Findings,
    place: Place,
    watcher: Watcher,
    *,
    verbose: bool = False,
    supervise: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        supervise: start again after a crash, with the adapter that was loaded last; see `QUICK` and `TRIES`.

    Raises:
        Failed: it could not start, or died.
        ValueError: the adapter to start again with is gone.
    """
    crashes, served = 0, False
    with _record(settings, place).changing(settings.served_adapter):
        pass
    with Signals() as signals:
        while not signals.stop.is_set():
            server = Server(settings, options, found, place, verbose)
            try:
                if server.wait_ready(signals.stop, watcher.loading):
                    served = True
                    watcher.ready(settings)
                    server.wait(signals.stop)
                return
            except Failed as failure:
                crashes = 1 if server.running_for > QUICK else crashes + 1
                if not supervise or not served:
                    raise
                if crashes >= TRIES:
                    raise Failed(f"{failure}. It crashed {crashes} times in a row: given up", failure.lines) from None
                pause = 2.0 ** (crashes - 1)
                watcher.crashed(failure, pause)
            finally:
                server.end(signals.hurry)
            signals.stop.wait(pause)
            settings = last_adapter(settings, place)
