"""The parent's side of a worker process."""

from __future__ import annotations

import json
import selectors
import sys
from dataclasses import asdict
from typing import Any, Self

from benchmarks import machine
from benchmarks.process import Started, free_port
from benchmarks.step.cases import Job, Rates, Times

ANSWER_SECONDS = 240.0


class WorkerError(RuntimeError):
    """A worker could not do what it was asked; the message says why."""


class Worker:
    """The processes of a job, one for each GPU. They import at once, and make the job's model when `make` asks.

    As a context manager it ends them.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.facts: dict[str, Any] = {}
        port = free_port()
        self._processes = [_Process(job.name, rank, job.gpus, port) for rank in range(job.gpus)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes:
            process.close()

    def make(self) -> None:
        """Have the model made. As all requests, this raises WorkerError if a process fails."""
        self.facts = self._ask({"job": asdict(self.job)})[0]

    def step(self, tokens: int) -> Times:
        """Time one step: the slowest process's parts, the memory of a GPU, and the processes' memory together."""
        found = [Times(**each) for each in self._ask({"tokens": tokens})]
        slowest = {part: max(getattr(each, part) for each in found) for part in ("forward", "backward", "optimizer")}
        return Times(**slowest, vram=max(each.vram for each in found), rss=sum(each.rss for each in found))

    def rates(self, threads: int | None) -> Rates:
        """Measure the machine."""
        return Rates(**self._ask({"rates": {"threads": threads, "read_bytes": machine.read_bytes()}})[0])

    def _ask(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        for process in self._processes:
            process.send(request)
        return [process.answer() for process in self._processes]


class _Process(Started):
    """One process of `benchmarks.step.worker`, `rank` of `ranks` that meet at this port."""

    LAST_LINES = 3

    def __init__(self, name: str, rank: int, ranks: int, port: int) -> None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        variables = {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        super().__init__([sys.executable, "-P", "-m", "benchmarks.step.worker"], True, variables if ranks > 1 else {})
        self.name, self._ready = name, False

    def send(self, request: dict[str, Any]) -> None:
        if not self._ready:
            self._read()
            self._ready = True
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> dict[str, Any]:
        """What it answers to the last request."""
        answer = self._read()
        if "error" in answer:
            raise WorkerError(f"{self.name}: {answer['error']}")
        return answer

    def _read(self) -> dict[str, Any]:
        stream = self._process.stdout
        assert stream is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            if not selector.select(ANSWER_SECONDS):
                raise WorkerError(f"{self.name}: no answer for {ANSWER_SECONDS:.0f} s")
        line = stream.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> WorkerError:
        code = self._process.wait()
        return WorkerError(f"{self.name}: its process ended with {code}: {self.last_lines()}")
