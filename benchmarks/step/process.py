"""The parent's side of a worker process."""

from __future__ import annotations

import json
import selectors
import sys
from dataclasses import asdict
from typing import Any

from benchmarks import machine
from benchmarks.process import Started
from benchmarks.step.cases import Job, Rates, Times

ANSWER_SECONDS = 240.0


class WorkerError(RuntimeError):
    """A worker could not do what it was asked; the message says why."""


class Worker(Started):
    """One process of `benchmarks.step.worker`. It imports at once, and makes the job's model when `make` asks."""

    LAST_LINES = 3

    def __init__(self, job: Job) -> None:
        super().__init__([sys.executable, "-P", "-m", "benchmarks.step.worker"], asked=True)
        self.job = job
        self.facts: dict[str, Any] = {}
        self._ready = False

    def make(self) -> None:
        """Have the model made. As all requests, this raises WorkerError if the process fails."""
        self.facts = self._ask({"job": asdict(self.job)})

    def step(self, tokens: int) -> Times:
        """Time one step."""
        return Times(**self._ask({"tokens": tokens}))

    def rates(self, threads: int | None) -> Rates:
        """Measure the machine."""
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
        return WorkerError(f"{self.job.name}: its process ended with {code}: {self.last_lines()}")
