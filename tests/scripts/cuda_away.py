"""What waits for backward, on the GPU and in host memory: the bits, the most GPU memory and the time of a step.

    python tests/scripts/cuda_away.py [--shape E,k,H,I] [--layers 8] [--tokens 2048] [--micro-batches 8]
        [--gpu-memory 22G] ...

The model is that of `ktft bench step`, with its micro-batches going through each layer together. First the gradients
of one step are compared bit for bit. Kernels that add in an order of their own may differ by themselves, so the step
on the GPU is compared with itself as well; then the differences are printed, and only those of host memory that are
larger fail. Then steps of both kinds take turns, with layers recorded and without. `--gpu-memory` holds the process
to so much, which must suffice for both kinds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from benchmarks.step.cases import ORDERS, Job, Times, parse_step_shape
from benchmarks.step.runners import Ktft, token_ids
from ktft.device import ACCELERATORS, device_of
from ktft.model.gpu_memory import hold_gpu_memory
from ktft.sizes import parse_size
from ktft.system import available_memory

Found = dict[tuple[bool, bool], list[Times]]


def switch(runner: Ktft, away: bool, recorded: bool) -> None:
    runner.by_layer = runner.order.recorder.on = recorded
    runner.order.away.on, runner.order.away.host.limit = away, available_memory() // 2


def gradients(runner: Ktft, batches: list[Tensor]) -> dict[str, Tensor]:
    """Those of one step, which begins with nothing in flight."""
    if runner.lanes is not None:
        runner.lanes.forget()
    torch.manual_seed(3)
    runner.optimizer.zero_grad()
    runner.accumulate(batches)
    device_of(runner.device).synchronize()
    return {name: p.grad.detach().cpu().clone() for name, p in runner.model.named_parameters() if p.grad is not None}


def largest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, relative to its norm; 0 for the same bits."""
    assert one.keys() == other.keys() and one
    return max(
        0.0 if torch.equal(a, other[name]) else float((a - other[name]).norm() / a.norm()) for name, a in one.items()
    )


def same_bits(runner: Ktft, batches: list[Tensor], recorded: bool) -> bool:
    for away in (False, True):  # recorded in the second use; compiled and warm
        switch(runner, away, recorded)
        for _ in range(3):
            gradients(runner, batches)
    found = []
    for away in (False, False, True, True):
        switch(runner, away, recorded)
        found.append(gradients(runner, batches))
    itself, others = largest(found[0], found[1]), [largest(found[0], each) for each in found[2:]]
    went = runner.order.away.host.bytes
    how = "recorded" if recorded else "plain"
    print(f"{how:8} the GPU with itself {itself:.2e}, with host memory {max(others):.2e}; {went / 1e9:.2f} GB locked")
    return went > 0 and max(others) <= 2 * itself


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="256,8,7168,2048", help="a name, or E,k,H,I [%(default)s]")
    parser.add_argument("--format", default="k4")
    parser.add_argument("--placement", default="stream")
    parser.add_argument("--gpu-memory", type=parse_size)
    for name, value in (("layers", 8), ("tokens", 2048), ("micro-batches", 8), ("runs", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    for kind in ACCELERATORS.values():
        kind.prepare()
    hold_gpu_memory(args.gpu_memory, 0)
    job = Job(
        "ktft", parse_step_shape(args.shape), args.layers, (args.tokens,), "uniform", 8, True, args.format,
        args.placement, micro_batches=args.micro_batches, order=ORDERS[0],
    )  # fmt: skip
    runner = Ktft(job)
    batches = [token_ids(args.tokens, runner.device) for _ in range(args.micro_batches)]
    ways = (False, True) if runner.by_layer else (False,)
    right = all([same_bits(runner, batches, recorded) for recorded in ways])
    found: Found = {(away, recorded): [] for away in (False, True) for recorded in ways}
    for _ in range(args.runs):
        for (away, recorded), steps in found.items():
            switch(runner, away, recorded)
            steps.append(runner.step(args.tokens))
    for (away, recorded), steps in found.items():
        step, vram = statistics.median(times.step for times in steps), max(times.vram for times in steps)
        where, how = "in host memory" if away else "on the GPU", "recorded" if recorded else "plain"
        print(f"{where:15} {how:8} step {1e3 * step:9.2f} ms, {vram / 1e9:6.2f} GB of GPU memory", flush=True)
    if runner.device.type in ACCELERATORS:
        grows = any(each.get("is_expandable") for each in torch.cuda.memory_snapshot())
        print(f"pieces of memory that grow in place: {grows}")
    print("the bits are the same" if right else "WRONG: gradients differ, or nothing went to host memory")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
