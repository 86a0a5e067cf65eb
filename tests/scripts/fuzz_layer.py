"""Compare the layer with the fp32 reference on random shapes, routings, formats, ISAs, threads, splits and ranks.

    python tests/scripts/fuzz_layer.py [--cases 2000] [--seed 0]

A case that misses the numeric contract is printed with its seed, and the script exits 1. At the end it prints the
errors by format.

With few routes and a small rank, sums may nearly cancel, and then no relative error is bounded. A case that misses the
contract is therefore compared with the reference's own change when hidden states and weights change in bf16's last bit.
An error of up to MARGIN times that change is due to the case's condition; it is printed and counted separately.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import contract as kernels

from ktft import native, reference
from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora

MARGIN, DRAWS = 4, 5


def condition(layer: native.ExpertLayer, lora: ExpertLora, *inputs: Tensor) -> dict[str, float]:
    """How much the reference's output and gradients change when x and all weights change by half a bf16 unit."""
    generator = torch.Generator().manual_seed(0)

    def noisy(values: Tensor) -> Tensor:
        return values.float() * (1 + 2**-8 * (torch.rand(values.shape, generator=generator) - 0.5))

    def forward(layer, x, index, weights, lora, activation):
        return reference.moe(noisy(x), index, weights, *map(noisy, kernels.dequantized(layer)), lora)

    draws = [kernels.compare(layer, lora, *inputs, forward=forward) for _ in range(DRAWS)]
    return {name: max(draw[name] for draw in draws) for name in draws[0]}


def run_case(rng: random.Random) -> tuple[str, str, dict[str, float], Callable[[], dict[str, float]]]:
    """One random case: its format, its description, the relative errors, and what computes its condition."""
    hidden, intermediate = (32 * rng.choice([1, 2, 3, 4, 5, 7, 9, 17, 33]) for _ in range(2))
    isa, fmt = rng.choice(native.isas()), rng.choice(native.FORMATS)
    row_counts = [0, 0, 1, 2, 5, 16, 31, 33, 64, 70]
    if isa in ("amx_emu", "scalar"):
        hidden, intermediate = min(hidden, 160), min(intermediate, 160)
    elif hidden * intermediate > 2**17:  # to save time, large in one direction only
        hidden, intermediate = (hidden, 96) if rng.random() < 0.5 else (96, intermediate)
    else:
        row_counts += [257, 720]
    threads, nodes = rng.randint(1, 4), rng.randint(1, 3)
    rows = tuple(rng.choice(row_counts) for _ in range(kernels.EXPERTS))
    rows = rows if sum(rows) else (1, *rows[1:])
    names = [name for name in PROJECTIONS if rng.random() < 0.7]
    rank, activation = rng.choice([1, 2, 3, 8, 16, 17, 33, 64, 256]), rng.choice(["retain", "recompute"])
    dtype = rng.choice([torch.float32, torch.bfloat16])
    shown = (
        f"H={hidden} I={intermediate} {isa} {fmt} threads={threads} nodes={nodes} rows={rows} r={rank} "
        f"lora={','.join(names) or 'none'} {dtype} {activation}"
    )
    layer = kernels.make_layer(hidden, intermediate, fmt, isa, threads, nodes)
    lora = kernels.make_lora(hidden, intermediate, rank, torch.float32, names)
    inputs = kernels.inputs_for(rows, hidden, dtype)
    return fmt, shown, kernels.compare(layer, lora, *inputs, activation), lambda: condition(layer, lora, *inputs)


def show(seen: dict[str, list[dict[str, float]]]) -> None:
    """Median and largest relative errors in %, by format."""
    table = Table("format", "cases", "output", "worst", "gradient", "worst", "which")
    for fmt, cases in sorted(seen.items()):
        outputs = [errors["output"] for errors in cases]
        grads = [(error, name) for errors in cases for name, error in errors.items() if name != "output"]
        worst, which = max(grads)
        percent = (median(outputs), max(outputs), median(error for error, _ in grads), worst)
        table.add_row(fmt, str(len(cases)), *(f"{100 * error:.3f}" for error in percent), which)
    Console().print(table)


def main(
    cases: Annotated[int, typer.Option(help="random cases")] = 2000,
    seed: Annotated[int, typer.Option(help="of the first case; case i uses seed + i")] = 0,
) -> None:
    """Fuzz the layer."""
    failed = ill = 0
    seen = defaultdict(list)
    for i in track(range(cases), "fuzzing"):
        fmt, shown, errors, measure_condition = run_case(random.Random(seed + i))
        seen[fmt].append(errors)
        try:
            kernels.assert_contract(errors)
        except AssertionError as error:
            allowed = {name: MARGIN * change for name, change in measure_condition().items()}
            excused = all(errors[name] <= max(allowed[name], limit) for name, limit in kernels.limits(errors).items())
            ill, failed = ill + excused, failed + (not excused)
            print(f"seed {seed + i}: {shown}: {error}; {MARGIN} times the condition: {allowed}")
    show(seen)
    print(f"{cases} cases, {failed} failed, {ill} ill-conditioned")
    sys.exit(failed > 0)


if __name__ == "__main__":
    typer.run(main)
