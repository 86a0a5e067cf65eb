"""The parent's side of a worker process."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks import machine
from benchmarks.step.cases import Job, Rates, Times

ANSWER_SECONDS = 240.0
LAST_LINES = 3


class WorkerError(RuntimeError):
    """A worker could not do what it was asked; the message says why."""


class Worker:
    """One process of `benchmarks.step.worker`. It imports at once, and makes the job's model when `make` asks for it.

    As a context manager, it ends the process and all that this one started.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.facts: dict[str, Any] = {}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        command = [sys.executable, "-P", "-m", "benchmarks.step.worker"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},  # the same ktft
        )
        self._ready = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def make(self) -> None:
        """Have the model made.

        Raises:
            WorkerError: it failed.
        """
        self.facts = self._ask({"job": self.job.to_dict()})

    def step(self, tokens: int) -> Times:
        """Time one step.

        Raises:
            WorkerError: it failed.
        """
        return Times(**self._ask({"tokens": tokens}))

    def rates(self, threads: int | None) -> Rates:
        """Measure the machine.

        Raises:
            WorkerError: it failed.
        """
        return Rates(**self._ask({"rates": {"threads": threads, "read_bytes": machine.read_bytes()}}))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if not self._ready:
            self._answer()
            self._ready = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None
        answer = self._answer()
        if "error" in answer:
            raise WorkerError(f"{self.job.name}: {answer['error']}")
        return answer

    def _answer(self) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            if not selector.select(ANSWER_SECONDS):
                raise WorkerError(f"{self.job.name}: no answer for {ANSWER_SECONDS:.0f} s")
        line = stream.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> WorkerError:
        code = self._process.wait()
        self._log.seek(0)
        last = " / ".join(self._log.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:])
        return WorkerError(f"{self.job.name}: its process ended with {code}: {last}")
