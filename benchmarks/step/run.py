"""Times training steps beside peers and the machine's limits: `ktft bench step`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.cases import Shape
from benchmarks.report import NOT_ASKED
from benchmarks.step import floor, models
from benchmarks.step.cases import Job, PeerFigure, Rates, StepRecord, Times
from benchmarks.step.peers import ONE_LAYER, PEERS, RUNNERS, Skipped
from benchmarks.step.process import Worker, WorkerError
from ktft import system

# Threads of the process that ran before may still spin: kt-kernel's do for 50 ms.
SETTLE_SECONDS = 0.15
WARM_STEPS = 20  # uncounted steps in which buffers grow, lanes learn their rates and `auto` tries placements
AROUND = 2  # runs of ktft before and after a peer's runs, from which the peer's ratio is taken


@dataclass(frozen=True)
class Plan:
    """The cases of one command: all combinations, `runs` steps each. `threads` None means one per physical core."""

    shapes: list[Shape]
    layers: list[int]
    gpus: list[int]
    tokens: list[int]
    micro_batches: int
    orders: list[str]
    routings: list[str]
    formats: list[str]
    placements: list[str]
    gpu_expert_memory: int | str
    gpu_activation_memory: list[int | str]
    rank: int
    checkpointing: bool
    runs: int
    threads: int | None
    peers: list[str]


@dataclass
class Peer:
    """The timed steps of a peer, by tokens, and those of ktft's models around them, by tokens and name."""

    times: dict[int, list[Times]]
    around: dict[tuple[int, str], list[Times]]


def _turn(worker: Worker, tokens: int) -> Times:
    """Time a step right after another, because in training no step begins idle or with cold caches."""
    worker.step(tokens)
    return worker.step(tokens)


class Group:
    """The models of one shape, number of layers and routing: they take turns of two steps, of which the second counts.
    `say` hears what is being done.
    """

    def __init__(self, plan: Plan, shape: Shape, layers: int, routing: str, say: Callable[[str], None]) -> None:
        self.plan, self.say = plan, say
        self.base = Job(
            "ktft", shape, layers, tuple(plan.tokens), routing, plan.rank, plan.checkpointing, threads=plan.threads,
            micro_batches=plan.micro_batches,
        )  # fmt: skip
        self.jobs = [
            replace(
                self.base,
                format=fmt,
                placement=placement,
                order=order,
                gpu_expert_memory=plan.gpu_expert_memory,
                gpu_activation_memory=stored,
                gpus=gpus,
            )
            for fmt in plan.formats
            for placement in plan.placements
            for order in plan.orders
            for stored in plan.gpu_activation_memory
            for gpus in plan.gpus
        ]
        self.failed: dict[str, str] = {}
        self.absent: dict[str, str] = {name: NOT_ASKED for name in (p.name for p in PEERS) if name not in plan.peers}
        self.times: dict[tuple[int, str], list[Times]] = {}
        self.skipped: dict[int, list[Times]] = {}
        self.rates: dict[int, list[Rates]] = {}
        self.peers: dict[str, Peer] = {}

    def run(self) -> None:
        """Time everything. `failed` and `absent` then hold whatever could not run, with the reason."""
        with ExitStack() as stack:
            workers = [stack.enter_context(Worker(job)) for job in self.jobs]
            self._without = stack.enter_context(Worker(replace(self.base, runner=Skipped.name)))
            for worker in (self._without, *workers):
                self.say(f"{self.title}: {worker.job.name} ...")
                self._try(worker, worker.make)
            self._workers = workers
            for tokens in self.plan.tokens:
                self.say(f"{self.title}, {tokens} tokens, warming up ...")
                self._without.step(tokens)
                for worker in workers:
                    for _ in range(WARM_STEPS):
                        self._try(worker, partial(worker.step, tokens))
                self._round(tokens, self.plan.runs, f"{self.title}, {tokens} tokens:")
            for name in self.plan.peers:
                self._time_peer(name)
            self.facts = {worker.job.name: worker.facts for worker in workers}

    @property
    def title(self) -> str:
        """For a person."""
        return f"{self.base.shape.name}, {self.base.layers} layers, {self.base.routing}"

    def _try(self, worker: Worker, act: Callable[[], object]) -> object:
        """The result of `act`; None if the worker has failed, now or before."""
        if worker.job.name in self.failed:
            return None
        try:
            return act()
        except WorkerError as error:
            if worker is self._without:
                raise
            self.failed[worker.job.name] = str(error)
            worker.close()
            return None

    def _round(self, tokens: int, runs: int, title: str) -> None:
        """Give each model a turn, `runs` times."""
        for run in range(runs):
            self.say(f"{title} {run + 1}/{runs}")
            time.sleep(SETTLE_SECONDS)
            self.rates.setdefault(tokens, []).append(self._without.rates(self.plan.threads))
            time.sleep(SETTLE_SECONDS)
            self.skipped.setdefault(tokens, []).append(_turn(self._without, tokens))
            for worker in self._workers:
                time.sleep(SETTLE_SECONDS)
                times = self._try(worker, partial(_turn, worker, tokens))
                if isinstance(times, Times):
                    self.times.setdefault((tokens, worker.job.name), []).append(times)

    def _time_peer(self, name: str) -> None:
        """Time a peer's steps between steps of ktft's models, then end its process."""
        if reason := RUNNERS[name].absent():
            self.absent[name] = reason
            return
        job = replace(self.base, runner=name, gpus=max(self.plan.gpus))
        peer = Peer({}, {})
        try:
            with Worker(job) as worker:
                self.say(f"{self.title}: {name} ...")
                worker.make()
                for tokens in self.plan.tokens:
                    self.say(f"{self.title}, {tokens} tokens: {name} ...")
                    before = {key: list(found[-AROUND:]) for key, found in self.times.items() if key[0] == tokens}
                    time.sleep(SETTLE_SECONDS)
                    steps = [worker.step(tokens) for _ in range(WARM_STEPS + self.plan.runs)]
                    self._round(tokens, AROUND, f"{self.title}, {tokens} tokens, after {name}:")
                    peer.times[tokens] = steps[WARM_STEPS:]
                    for key, first in before.items():
                        peer.around[key] = first + self.times[key][-AROUND:]
        except WorkerError as error:
            self.absent[name] = str(error).removeprefix(f"{name}: ")
        if peer.times:
            self.peers[name] = peer


def median(values: list[Times], part: str) -> float:
    """The median of one part's seconds or bytes."""
    return statistics.median(getattr(each, part) for each in values)


def parts(times: list[Times]) -> dict[str, Any]:
    """The figures that ktft's models and peers have alike."""
    seconds = {f"{part}_ms": 1e3 * median(times, part) for part in ("forward", "backward", "optimizer")}
    return seconds | {"vram_bytes": int(median(times, "vram")), "rss_bytes": int(median(times, "rss"))}


def marginal(group: Group, times: list[Times], smaller: Group | None, fewer: list[Times] | None) -> float | None:
    """Milliseconds that one more layer takes; None if no group of fewer layers was timed."""
    if smaller is None or fewer is None:
        return None
    return 1e3 * (median(times, "step") - median(fewer, "step")) / (group.base.layers - smaller.base.layers)


def figures(group: Group, job: Job, tokens: int, smaller: Group | None) -> Iterator[tuple[str, PeerFigure]]:
    """The figures of the peers, compared with one of ktft's models on as many GPUs."""
    name = job.name
    for peer, timed in group.peers.items():
        if job.gpus != max(group.plan.gpus):
            continue
        if tokens not in timed.times or (tokens, name) not in timed.around:
            continue
        times, layers = timed.times[tokens], 1 if peer == ONE_LAYER else group.base.layers
        each = median(times, "step") / layers
        ours = median(timed.around[tokens, name], "step") / group.base.layers
        fewer = None
        if smaller is not None and peer in smaller.peers and peer != ONE_LAYER:
            fewer = smaller.peers[peer].times.get(tokens)
        yield (
            peer,
            PeerFigure(
                ms_per_layer=1e3 * each,
                marginal_ms_per_layer=marginal(group, times, smaller, fewer),
                ratio=each / ours,
                note=RUNNERS[peer].note,
                **parts(times),
            ),
        )


def record(group: Group, job: Job, tokens: int, smaller: Group | None) -> StepRecord:
    """One of ktft's models at one batch size; `smaller` is the group of fewer layers, if one was timed."""
    times, facts = group.times[tokens, job.name], group.facts[job.name]
    step, around = median(times, "step"), median(group.skipped[tokens], "passes")
    rates = Rates(
        *(statistics.median(getattr(each, name) for each in group.rates[tokens]) for name in Rates.__annotations__)
    )
    counts = [[count * job.micro_batches for count in models.counts(job, layer, tokens)] for layer in range(job.layers)]
    least = around + floor.experts_floor(replace(job, placement=facts["lanes"]), counts, rates)
    fewer = smaller.times.get((tokens, job.name)) if smaller is not None else None
    return StepRecord(
        **job.shape.in_record(),
        layers=job.layers,
        gpus=job.gpus,
        tokens=tokens,
        micro_batches=job.micro_batches,
        order=job.order,
        routing=job.routing,
        rank=job.rank,
        checkpointing=job.checkpointing,
        format=job.format,
        placement=job.placement,
        gpu_expert_memory=job.settings().gpu_expert_memory,
        gpu_activation_memory=job.gpu_activation_memory,
        device=facts["device"],
        cpu=system.cpu_name(),
        isa=facts["isa"],
        threads=facts["threads"],
        runs=len(times),
        step_ms=1e3 * step,
        spread=(max(each.step for each in times) - min(each.step for each in times)) / step,
        ms_per_layer=1e3 * step / job.layers,
        marginal_ms_per_layer=marginal(group, times, smaller, fewer),
        tokens_per_second=job.gpus * job.micro_batches * tokens / step,
        without_experts_ms=1e3 * around,
        floor_ms=1e3 * least,
        over_floor=median(times, "passes") / least,
        vram_experts_bytes=int(median(times, "vram") - median(group.skipped[tokens], "vram")),
        pcie_gbs=rates.pcie / 1e9,
        read_gbs=rates.read / 1e9,
        registers_tflops=rates.registers / 1e12,
        gpu_tflops=rates.gpu / 1e12,
        peers=dict(figures(group, job, tokens, smaller)),
        absent_peers=group.absent,
        **parts(times),
    )


def run(plan: Plan, say: Callable[[str], None]) -> Iterator[StepRecord | str]:
    """Yield records as they are measured, and a line for each of ktft's models that could not run.

    Raises:
        WorkerError: not even the model without experts could run.
        ValueError: settings that ktft does not accept.
    """
    for shape in plan.shapes:
        for routing in plan.routings:
            smaller: Group | None = None
            for layers in sorted(set(plan.layers)):
                group = Group(plan, shape, layers, routing, say)
                group.run()
                yield from (f"{group.title}: {reason}" for reason in group.failed.values())
                for tokens in plan.tokens:
                    for job in group.jobs:
                        if (tokens, job.name) in group.times:
                            yield record(group, job, tokens, smaller)
                smaller = group
