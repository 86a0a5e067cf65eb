"""Times the routed experts of one layer beside the machine's ceilings and the peers: `ktft bench kernels`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks import layers, machine
from benchmarks.cases import Case, Record, Shape
from benchmarks.layers import Ktft, Runner
from benchmarks.measure import measure
from benchmarks.peer import Job, Peer
from benchmarks.peer_kt import KT_KERNEL
from benchmarks.peer_self import SELF_PEERS
from benchmarks.peer_torch import TORCH_PEERS
from benchmarks.report import NOT_ASKED
from ktft import native

LIBRARIES: tuple[Peer, ...] = (*TORCH_PEERS, KT_KERNEL)
PEERS: tuple[Peer, ...] = (*LIBRARIES, *SELF_PEERS)


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


def run(
    say: Callable[[str], None],
    *,
    shapes: list[Shape],
    tokens: list[int],
    routings: list[str],
    formats: list[str],
    rank: int,
    runs: int,
    threads: int | None,
    peers: list[str],
    w8a8: bool,
) -> Iterator[Record]:
    """Yield the records of all combinations as they are measured. `say` gets the name of each step.

    Args:
        runs: timed runs of each case.
        threads: None means one per physical core.
        w8a8: whether int8's forward is also timed with 8-bit activations.

    Raises:
        ValueError: the kernels do not support a shape or the number of threads.
    """
    torch.manual_seed(0)
    runtime = native.runtime(threads)
    torch.set_num_threads(runtime.threads)
    say("read bandwidth ...")
    memory = native.StreamedMemory(runtime, machine.read_bytes())
    for shape in shapes:
        say(f"{shape.name}: weights ...")
        weights, lora = layers.make_weights(shape), layers.make_lora(shape, rank)
        for fmt in formats:
            say(f"{shape.name}: packing {fmt} ...")
            ktft = Ktft(shape, fmt, runtime, weights, lora, w8a8=w8a8 and fmt == "int8")
            cases = [Case(shape, t, routing, fmt, rank) for t in tokens for routing in routings]
            largest = max(cases, key=lambda case: case.tokens)
            job = Job(largest, weights, lora, layers.make_batch(largest), ktft)
            made, absent = _make_peers(job, peers, say)
            for case in cases:
                say(f"{shape.name}, {case.tokens} tokens, {case.routing}, {fmt} ...")
                yield from measure(case, ktft, layers.make_batch(case), made, absent, memory, runs)
            del ktft, made
