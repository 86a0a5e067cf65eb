"""Times of an optimizer step in each order, and with decoder layers recorded or not, taking turns in one process.

    python tests/scripts/step_orders.py [--shape E,k,H,I] [--layers 4] [--tokens 2048] [--micro-batches 8] ...

The model is that of `ktft bench step`. The cases are: all micro-batches through a layer together; each through the
whole model, the usual order; one micro-batch; one batch of all their tokens. Each is timed with layers recorded (on a
GPU) and without. Beside the medians are the bytes of packed experts that went to the GPU in a step, and the most GPU
memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.step.cases import ORDERS, Job, Times, parse_step_shape
from benchmarks.step.runners import Ktft

Found = dict[tuple[str, bool], list[tuple[Times, int]]]


def timed(runner: Ktft, job: Job, tokens: int, recorded: bool) -> tuple[Times, int]:
    """A step right after another of its kind, and the bytes that it copied to the GPU."""
    runner.job = job
    runner.by_layer = runner.order.recorder.on = recorded
    runner.step(tokens)
    before = copied(runner)
    times = runner.step(tokens)
    return times, copied(runner) - before


def copied(runner: Ktft) -> int:
    running = None if runner.lanes is None else runner.lanes.running
    return 0 if running is None else running.gpu.transfer.copied_bytes


def show(found: Found) -> None:
    for (name, recorded), steps in found.items():
        step = statistics.median(times.step for times, _ in steps)
        passes = statistics.median(times.passes for times, _ in steps)
        moved, vram = max(size for _, size in steps), max(times.vram for times, _ in steps)
        how = "recorded" if recorded else "plain"
        print(
            f"{name:16} {how:8} step {1e3 * step:9.2f} ms, forward and backward {1e3 * passes:9.2f} ms, "
            f"{moved / 1e9:8.3f} GB to the GPU, {vram / 1e9:6.2f} GB of GPU memory",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="a name, or E,k,H,I [%(default)s]")
    parser.add_argument("--format", default="k4")
    parser.add_argument("--placement", default="stream")
    for name, value in (("layers", 4), ("tokens", 2048), ("micro-batches", 8), ("runs", 5), ("warm", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    many, tokens = args.micro_batches, args.tokens
    job = Job(
        "ktft", parse_step_shape(args.shape), args.layers, (tokens, tokens * many), "uniform", 8, True, args.format,
        args.placement, micro_batches=many, order=ORDERS[0],
    )  # fmt: skip
    one, runner = replace(job, micro_batches=1), Ktft(job)
    cases = {
        "together": (job, tokens),
        "usual order": (replace(job, order=ORDERS[1]), tokens),
        "one micro-batch": (one, tokens),
        "one batch of all": (one, tokens * many),
    }
    ways = (True, False) if runner.by_layer else (False,)
    found: Found = {(name, way): [] for name in cases for way in ways}
    for run in range(args.warm + args.runs):
        for (name, way), steps in found.items():
            try:
                step = timed(runner, *cases[name], way)
            except torch.OutOfMemoryError as error:
                print(f"{name}: {str(error).splitlines()[0]}")
                continue
            if run >= args.warm:
                steps.append(step)
    show({key: steps for key, steps in found.items() if steps})


if __name__ == "__main__":
    main()
