"""Times one case. Each run times the ceilings, ktft and each peer in turn, so that all see the same machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks import accuracy
from benchmarks.cases import STEPS, W8A8_STEP, Case, PeerFigure, Record
from benchmarks.layers import Batch, Ktft, Runner
from ktft import native, system

# Short cases are repeated within a run until they take about this long together.
RUN_SECONDS, MOST_REPEATS = 0.05, 20
WARM_REPEATS = 3
# Threads of the library that ran before may still spin: torch's did for 7 ms, kt-kernel's for 50.
SETTLE_SECONDS = 0.15
MOST_ROWS = 704  # the most rows of one GEMM call

Times = dict[str, float]  # step -> seconds


@dataclass(frozen=True)
class Run:
    """The figures of one run: FLOP/s of the ceilings, ktft's times, and the peers' times by name."""

    registers: float
    hot: float
    streamed: float
    ktft: Times
    peers: dict[str, Times]


def _once(runner: Runner, batch: Batch) -> Times:
    start = time.perf_counter()
    runner.forward(batch)
    forward = time.perf_counter() - start
    if not runner.has_backward:
        return {"forward": forward}
    start = time.perf_counter()
    backward = runner.train(batch)
    middle = time.perf_counter()
    backward()
    end = time.perf_counter()
    return {"forward": forward, "backward": end - middle, "forward+backward": end - start}


def _once_ours(ktft: Ktft, batch: Batch) -> Times:
    times = _once(ktft, batch)
    if ktft.w8a8:
        start = time.perf_counter()
        ktft.forward_w8a8(batch)
        times[W8A8_STEP] = time.perf_counter() - start
    return times


def _weight_bytes(ktft: Ktft, batch: Batch) -> dict[str, int]:
    """Step -> bytes of packed weights that the step's products read."""
    take = ktft.layers[0].runtime.take_weight_bytes
    take()
    ktft.forward(batch)
    counted = {"forward": take()}
    backward = ktft.train(batch)
    take()
    backward()
    counted["backward"] = take()
    counted["forward+backward"] = sum(counted.values())
    if ktft.w8a8:
        ktft.forward_w8a8(batch)
        counted[W8A8_STEP] = take()
    return counted


def _steps(once: Callable[[Batch], Times], batches: Iterator[Batch], repeats: int) -> Times:
    times = [once(next(batches)) for _ in range(repeats)]
    return {step: statistics.median(one[step] for one in times) for step in times[0]}


def _run(
    ktft: Ktft, peers: dict[str, Runner], batches: Iterator[Batch], memory: native.StreamedMemory, repeats: int
) -> Run:
    layer = ktft.layers[0]
    rows = min(-(-next(batches).index.numel() // layer.num_experts), MOST_ROWS)
    time.sleep(SETTLE_SECONDS)
    registers, hot = native.compute_ceilings(layer.runtime)
    streamed = memory.gemm(rows, layer.hidden_size)
    ours = _steps(partial(_once_ours, ktft), batches, repeats)
    theirs = {}
    for name, peer in peers.items():
        time.sleep(SETTLE_SECONDS)
        theirs[name] = _steps(partial(_once, peer), batches, repeats)
    return Run(registers, hot, streamed, ours, theirs)


def _peer_figures(step: str, runs: list[Run]) -> Iterator[tuple[str, PeerFigure]]:
    beside = "forward" if step == W8A8_STEP else step
    for name in runs[0].peers:
        pairs = [(run.ktft[step], run.peers[name][beside]) for run in runs if beside in run.peers[name]]
        if pairs:
            ratio = statistics.median(theirs / ours for ours, theirs in pairs)
            yield name, PeerFigure(statistics.median(theirs for _, theirs in pairs) * 1e3, ratio)


def _median(runs: list[Run], figure: Callable[[Run], float]) -> float:
    return statistics.median(figure(run) for run in runs)


def _record(
    case: Case,
    step: str,
    runs: list[Run],
    ktft: Ktft,
    batch: Batch,
    read: float,
    error: float,
    weight_bytes: int,
    absent: dict[str, str],
) -> Record:
    runtime = ktft.layers[0].runtime
    passes = STEPS.get(step, 1)
    flops, seconds = case.pass_flops * passes, _median(runs, lambda run: run.ktft[step])
    used = len(batch.index.unique()) / case.shape.num_experts
    least = ktft.layer_bytes * used * passes
    bandwidth = least / seconds
    return Record(
        **case.shape.in_record(),
        tokens=case.tokens,
        routing=case.routing,
        format=case.format,
        rank=case.rank,
        step=step,
        cpu=system.cpu_name(),
        isa=runtime.isa,
        threads=runtime.threads,
        nodes=runtime.nodes,
        runs=len(runs),
        copies=len(ktft.layers),
        rotated_bytes=len(ktft.layers) * ktft.layer_bytes,
        ms=seconds * 1e3,
        tflops=flops / seconds / 1e12,
        registers_tflops=_median(runs, lambda run: run.registers) / 1e12,
        hot_tflops=_median(runs, lambda run: run.hot) / 1e12,
        streamed_tflops=_median(runs, lambda run: run.streamed) / 1e12,
        percent_of_registers=100 * _median(runs, lambda run: flops / run.ktft[step] / run.registers),
        percent_of_hot=100 * _median(runs, lambda run: flops / run.ktft[step] / run.hot),
        percent_of_streamed=100 * _median(runs, lambda run: flops / run.ktft[step] / run.streamed),
        gbs=bandwidth / 1e9,
        read_gbs=read / 1e9,
        percent_of_read=100 * bandwidth / read,
        weight_reads=weight_bytes / least,
        max_error=error,
        peers=dict(_peer_figures(step, runs)),
        absent_peers=absent,
    )


def measure(
    case: Case,
    ktft: Ktft,
    batch: Batch,
    peers: dict[str, Runner],
    absent: dict[str, str],
    memory: native.StreamedMemory,
    runs: int,
) -> list[Record]:
    """Measure one record per step. The first run is a warm-up; bandwidth is measured before and after all runs."""
    errors = accuracy.errors(ktft, batch)
    weight_bytes = _weight_bytes(ktft, batch)
    reads = [memory.read() for _ in range(2)]
    batches = batch.around(case.shape.num_experts)
    warm = _run(ktft, peers, batches, memory, WARM_REPEATS).ktft["forward+backward"]
    repeats = max(1, min(MOST_REPEATS, round(RUN_SECONDS / warm)))
    timed = [_run(ktft, peers, batches, memory, repeats) for _ in range(runs)]
    reads += [memory.read() for _ in range(2)]
    read = statistics.median(reads)
    return [_record(case, step, timed, ktft, batch, read, errors[step], weight_bytes[step], absent) for step in errors]
