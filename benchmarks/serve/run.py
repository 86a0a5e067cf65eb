"""Times servers beside each other: `ktft bench serve`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.report import NOT_ASKED
from benchmarks.serve.cases import Job, Load, ServeRecord, Timing
from benchmarks.serve.client import Client, ServerFailed
from benchmarks.serve.servers import PEERS, ROWS, Process, running
from ktft import system
from ktft.device import accelerator

WARM_ROUNDS = 1


@dataclass(frozen=True)
class Plan:
    """The cases of one command.

    Attributes:
        job: the settings that servers are started with.
        url, model_name: a running server and the model to ask it for; None starts `ktft serve`.
        peers: names of the servers to time beside it.
        loads: the loads of each server, `rounds` times each.
        together: whether all servers run at once and take turns, instead of one after the other.
        title, layers: the model's name and number of layers, for the records.
    """

    job: Job
    url: str | None
    model_name: str | None
    peers: list[str]
    loads: list[Load]
    rounds: int
    together: bool
    title: str
    layers: int | None


def run(plan: Plan, say: Callable[[str], None]) -> Iterator[ServeRecord]:
    """Records, server by server.

    Raises:
        ServerFailed: ktft's server, or the one at `url`, failed. A peer that fails is in `absent_peers`.
    """
    absent = {row.name: NOT_ASKED for row in PEERS if row.name not in plan.peers}
    absent |= {name: reason for name in plan.peers if (reason := ROWS[name].absent(plan.job))}
    names = ["ktft", *(name for name in plan.peers if name not in absent)]
    timings: dict[tuple[str, Load], list[list[Timing]]] = {}
    for group in [names] if plan.together else [[name] for name in names]:
        _time_group(plan, group, timings, absent, say)
    for name in names:
        for load in plan.loads:
            if found := timings.get((name, load)):
                yield record(plan, name, load, found, absent)


def _time_group(
    plan: Plan,
    names: Sequence[str],
    timings: dict[tuple[str, Load], list[list[Timing]]],
    absent: dict[str, str],
    say: Callable[[str], None],
) -> None:
    """Time servers that run at the same time and take turns, round by round."""
    with ExitStack() as stack:
        servers: dict[str, Client] = {}
        for name in names:
            say(f"starting {name} ...")
            try:
                servers[name] = _start(plan, name, stack)
            except ServerFailed as error:
                _give_up(name, error, absent)
        for number, load in enumerate(plan.loads):
            for turn in range(-WARM_ROUNDS, plan.rounds):
                for name, server in list(servers.items()):
                    say(f"{load.clients} clients, round {turn + 1}/{plan.rounds}: {name}")
                    try:
                        found = server.round(load, seed=1000 * number + turn + WARM_ROUNDS)
                    except ServerFailed as error:
                        _give_up(name, error, absent)
                        del servers[name]
                        continue
                    if turn >= 0:
                        timings.setdefault((name, load), []).append(found)


def _start(plan: Plan, name: str, running_until: ExitStack) -> Client:
    if name == "ktft" and plan.url is not None:
        return running(plan.url, plan.model_name)
    process = Process(ROWS[name], plan.job, lambda ids: str(_tokenizer(plan.job.model).decode(ids)))
    return running_until.enter_context(process).client


def _give_up(name: str, error: ServerFailed, absent: dict[str, str]) -> None:
    if name == "ktft":
        raise error
    absent[name] = str(error)


@cache
def _tokenizer(model: Path | None) -> Any:
    """It turns token ids into a text, for servers that take nothing else."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def take_turns(asked: bool | None) -> bool:
    """Whether all servers run at once. Unless asked, they do without a GPU, most of whose memory each would take."""
    return asked if asked is not None else device_name() == "cpu"


def device_name() -> str:
    """The GPU that servers find here, or `cpu`."""
    gpu = accelerator()
    return gpu.name() if gpu is not None else "cpu"


def decode_rate(timings: Sequence[Timing]) -> float | None:
    """Tokens per second of all clients while all of them get answers; None if there is no such time."""
    begin, end = max(each.arrivals[0] for each in timings), min(each.arrivals[-1] for each in timings)
    tokens = sum(begin < at <= end for each in timings for at in each.arrivals)
    return tokens / (end - begin) if end > begin and tokens else None


def record(
    plan: Plan,
    name: str,
    load: Load,
    rounds: Sequence[Sequence[Timing]],
    absent: dict[str, str],
) -> ServeRecord:
    """The medians of one server under one load."""
    first = [each.arrivals[0] for one in rounds for each in one]
    gaps = [gap for one in rounds for each in one for gap in each.gaps] or [0.0]
    prefill = [sum(t.prompt_tokens for t in one) / max(t.arrivals[0] for t in one) for one in rounds]
    decode = [rate for one in rounds if (rate := decode_rate(one)) is not None]
    output = [sum(len(t.arrivals) for t in one) / max(t.arrivals[-1] for t in one) for one in rounds]
    return ServeRecord(
        server=plan.url if name == "ktft" and plan.url is not None else name,
        model=plan.title,
        layers=plan.layers,
        device=device_name(),
        cpu=system.cpu_name(),
        clients=load.clients,
        prompt_tokens=round(statistics.median(t.prompt_tokens for one in rounds for t in one)),
        output_tokens=round(statistics.median(len(t.arrivals) for one in rounds for t in one)),
        rounds=len(rounds),
        ttft_ms=1e3 * statistics.median(first),
        ttft_p95_ms=1e3 * percentile(first, 0.95),
        itl_ms=1e3 * statistics.median(gaps),
        itl_p95_ms=1e3 * percentile(gaps, 0.95),
        prefill_tokens_per_second=statistics.median(prefill),
        decode_tokens_per_second=statistics.median(decode) if decode else None,
        output_tokens_per_second=statistics.median(output),
        note=ROWS[name].note,
        absent_peers=absent,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least the given share of values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
