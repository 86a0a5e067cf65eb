"""The parent process of `ktft serve`: it starts the server, waits until it serves, ends it, and starts it again.

The engine runs in a process group of its own, and this process never imports it.
"""

from __future__ import annotations

import http.client
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

from ktft import config
from ktft.serve.engine import DRAIN, Findings, Options
from ktft.serve.front.adapter_record import AdapterRecord
from ktft.serve.front.door import names_of
from ktft.serve.front.processes import end_group
from ktft.serve.runtime.progress import Progress, read_progress
from ktft.serve.runtime.settings import ServeSettings

QUICK, TRIES = 300.0, 5
"""A crash within `QUICK` seconds of the start is a quick one. After `TRIES` quick ones in a row no start follows."""
_POLL = 0.1  # seconds
_SHOWN = 15  # lines of the log
# Triton's bindings print dozens of these lines after whatever went wrong
_LEAKS = re.compile(r"nanobind: | - leaked |See https://nanobind| - \.\.\. skipped remainder")
_CAUSE = re.compile(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception): .+|error: argument .+)$")


class Failed(Exception):
    """The server could not start, or has died. `lines` are the end of its log."""

    def __init__(self, message: str, lines: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.lines = tuple(lines)


def environment(settings: ServeSettings, options: Options, found: Findings) -> dict[str, str]:
    """The environment of the server: this process's own, and what ktft and the engine read from it."""
    own = {"PYTHONUNBUFFERED": "1"} | dict(os.environ) | settings.to_env()
    own |= {config.API_KEY_ENV: options.api_key or "", config.ADMIN_KEY_ENV: options.admin_key or ""}
    return found.engine.environment(own, settings, found)


def url(options: Options) -> str:
    """The address at which a client on this machine reaches the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(options.host, options.host)
    return f"http://[{host}]:{options.port}" if ":" in host else f"http://{host}:{options.port}"


@dataclass(frozen=True)
class ServerPlace:
    """The directory of a server's files: its progress, its log, and the record of its adapters."""

    directory: Path

    @property
    def status(self) -> Path:
        """The file of `ktft.serve.runtime.progress`."""
        return self.directory / "status.json"

    @property
    def log(self) -> Path:
        """What the server's processes print."""
        return self.directory / "server.log"


class Server:
    """One start of a server. Its log goes to `place`, or if `verbose` to this process's standard error."""

    def __init__(
        self, settings: ServeSettings, options: Options, found: Findings, place: ServerPlace, verbose: bool = False
    ) -> None:
        self.engine, self.options, self.place, self.verbose = found.engine, options, place, verbose
        settings = replace(
            settings,
            status_path=str(place.status),
            max_adapters=settings.max_adapters
            or (max(1, len(settings.adapters)) if found.gpu else config.MAX_ADAPTERS),
            hosts=names_of(options.host, options.allowed_hosts),
            origins=self.engine.allowed_origins(options.extra),
            parent=os.getpid(),
        )
        place.status.unlink(missing_ok=True)
        # -P: a file in the working directory must not shadow a package
        command = [sys.executable, "-P", "-m", self.engine.module, *self.engine.arguments(settings, options, found)]
        with place.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment(settings, options, found),
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if verbose else log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a terminal's Ctrl-C then reaches the parent alone
            )
        self.began = time.monotonic()

    def wait_ready(self, stop: threading.Event, report: Callable[[Progress], None]) -> bool:
        """Wait until the server answers, and `report` how far it is. Returns False if `stop` was set first.

        Raises:
            Failed: the server ended before.
        """
        while not stop.wait(_POLL):
            self.require_alive("could not start")
            progress = read_progress(self.place.status)
            if progress is None:
                report(Progress(f"Starting {self.engine.name}"))
            elif progress.error is None:
                report(progress)
            if _healthy(self.options):
                return True
        return False

    def wait(self, stop: threading.Event) -> None:
        """Return once `stop` is set. Raises `Failed` if the server died before."""
        while not stop.wait(_POLL):
            self.require_alive("has died")

    def require_alive(self, what: str) -> None:
        """Raise `Failed` if the server has ended, whatever its exit code: vLLM's is 0 even if its engine has died."""
        if (code := self._process.poll()) is not None:
            said = [] if self.verbose else [line for line in self._log() if not _LEAKS.match(line)]
            raise Failed(f"the server {what}: {self._reason(code)}", said[-_SHOWN:])

    def _reason(self, code: int) -> str:
        progress = read_progress(self.place.status)
        if progress is not None and progress.error:
            return progress.error
        if code < 0:
            hint = " (dmesg tells whether memory ran out)" if code == -signal.SIGKILL else ""
            return f"killed by {signal.Signals(-code).name}{hint}"
        causes = [match[1] for line in self._log() if (match := _CAUSE.search(line))]
        return causes[0] if causes else f"{self.engine.name} ended with exit code {code}"

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
    """A context manager of the main thread: the first SIGINT, SIGTERM or SIGHUP sets `stop`, a second one `hurry`."""

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


@dataclass(frozen=True)
class Watcher:
    """Functions that are called while a server runs."""

    loading: Callable[[Progress], None]
    """With how far loading is."""
    ready: Callable[[ServeSettings], None]
    """With the settings that are served."""
    crashed: Callable[[Failed, float], None]
    """With what happened, and the seconds until the next start."""


def run(
    settings: ServeSettings,
    options: Options,
    found: Findings,
    place: ServerPlace,
    watcher: Watcher,
    *,
    verbose: bool = False,
    supervise: bool = False,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings, options, found, place, verbose: see `Server`.
        watcher: is told what happens.
        supervise: whether to start again after a crash, with the adapters that were served; see `TRIES`.

    Raises:
        Failed: the server could not start, or died.
        ValueError: an adapter to start again with is gone, or its record cannot be read.
    """
    crashes, served = 0, False
    settings = replace(settings, status_path=str(place.status))
    record = AdapterRecord(settings.adapter_file)
    with record.changing(settings.adapters):
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
                crashes = 1 if time.monotonic() - server.began > QUICK else crashes + 1
                if not supervise or not served:
                    raise
                if crashes >= TRIES:
                    raise Failed(f"{failure}. It crashed {crashes} times in a row: given up", failure.lines) from None
                pause = 2.0 ** (crashes - 1)
                watcher.crashed(failure, pause)
            finally:
                server.end(signals.hurry)
            signals.stop.wait(pause)
            settings = replace(settings, adapters=record.read())
