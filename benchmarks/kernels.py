"""Times the routed experts of one layer beside the machine's ceilings and the peers: `ktft bench kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from benchmarks import layers, machine
from benchmarks.cases import Case, Record, Shape
from benchmarks.layers import Ktft, Runner
from benchmarks.measure import measure
from benchmarks.peer import Job
from benchmarks.peers import PEERS
from benchmarks.report import NOT_ASKED
from ktft import native


@dataclass(frozen=True)
class Plan:
    """The cases of one command: all combinations, with `runs` runs each. `threads` None means one per physical core.
    With `w8a8`, int8's forward is also timed with 8-bit activations.
    """

    shapes: list[Shape]
    tokens: list[int]
    routings: list[str]
    formats: list[str]
    rank: int
    runs: int
    threads: int | None
    peers: list[str]
    w8a8: bool = False


def _make_peers(job: Job, wanted: list[str], say: Callable[[str], None]) -> tuple[dict[str, Runner], dict[str, str]]:
    """The peers that run this case, and why the others do not."""
    made: dict[str, Runner] = {}
    absent: dict[str, str] = {}
    for peer in PEERS:
        reason = peer.absent() if peer.name in wanted else NOT_ASKED
        if not reason:
            say(f"{peer.name} ...")
            try:
                made[peer.name] = peer.make(job)
            except ValueError as error:
                reason = str(error)
        if reason:
            absent[peer.name] = reason
    return made, absent


def run(plan: Plan, say: Callable[[str], None]) -> Iterator[Record]:
    """Yield records as they are measured. `say` gets the name of each step.

    Raises:
        ValueError: the kernels do not support a shape or the number of threads.
    """
    torch.manual_seed(0)
    runtime = native.runtime(plan.threads)
    torch.set_num_threads(runtime.threads)
    say("read bandwidth ...")
    memory = native.StreamedMemory(runtime, machine.read_bytes())
    for shape in plan.shapes:
        say(f"{shape.name}: weights ...")
        weights, lora = layers.make_weights(shape), layers.make_lora(shape, plan.rank)
        for fmt in plan.formats:
            say(f"{shape.name}: packing {fmt} ...")
            ktft = Ktft(shape, fmt, runtime, weights, lora, w8a8=plan.w8a8 and fmt == "int8")
            cases = [Case(shape, t, routing, fmt, plan.rank) for t in plan.tokens for routing in plan.routings]
            largest = max(cases, key=lambda case: case.tokens)
            job = Job(largest, weights, lora, layers.make_batch(largest), ktft)
            peers, absent = _make_peers(job, plan.peers, say)
            for case in cases:
                say(f"{shape.name}, {case.tokens} tokens, {case.routing}, {fmt} ...")
                yield from measure(case, ktft, layers.make_batch(case), peers, absent, memory, plan.runs)
            del ktft, peers
