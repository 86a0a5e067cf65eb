"""Print the table of docs/reference/formats.md: the bits and the error of each expert format.

    python tests/scripts/quantization_error.py [--size 2048]

Errors are relative RMS errors in %, of Gaussian weights and of weights with Student's t distribution of 5 degrees of
freedom. Two well-known 4-bit schemes, computed here from their definitions, are listed for comparison.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from packing import error_percent, gaussian, pack, round_trip, student_t5

from ktft import native


def q4_0_style(weight: Tensor) -> Tensor:
    """Groups of 32: fp16 scale = (the value of largest magnitude) / -8, codes 0 to 15 minus 8. 4.5 bits."""
    groups = weight.view(-1, 32)
    extreme = groups.gather(1, groups.abs().argmax(1, keepdim=True))
    inverse = torch.where(extreme == 0, torch.zeros(()), -8 / extreme)
    codes = (groups * inverse + 8.5).floor().clamp(0, 15) - 8
    return (codes * (extreme / -8).half().float()).view_as(weight)


def nf4_style(weight: Tensor) -> Tensor:
    """Groups of 64: fp32 absmax times the nearest of 16 quantiles of the normal distribution (QLoRA). 4.5 bits."""
    outermost = 0.5 * (1 - 1 / 32 + 1 - 1 / 30)
    above = torch.special.ndtri(torch.linspace(outermost, 0.5, 9, dtype=torch.float64)[:-1])
    below = -torch.special.ndtri(torch.linspace(outermost, 0.5, 8, dtype=torch.float64)[:-1])
    table = torch.cat([below, torch.zeros(1, dtype=torch.float64), above]).sort().values
    table = (table / table.abs().max()).float()
    groups = weight.view(-1, 64)
    largest = groups.abs().amax(1, keepdim=True)
    codes = torch.bucketize(groups / largest, (table[1:] + table[:-1]) / 2)
    return (table[codes] * largest).view_as(weight)


def main(size: Annotated[int, typer.Option(help="rows and columns of the matrix")] = 2048) -> None:
    """Print the table."""
    weights = gaussian(size, size), student_t5(size, size)
    rows: list[tuple[str, float, list[Tensor]]] = []
    for fmt in native.FORMATS:
        bits = pack(fmt, weights[0]).packed_bytes * 8 / (3 * size * size)
        rows.append((f"`{fmt}`", bits, [round_trip(fmt, weight) for weight in weights]))
    for name, scheme in (("Q4_0-style", q4_0_style), ("NF4-style", nf4_style)):
        rows.append((name, 4.5, [scheme(weight) for weight in weights]))
    print("| Format | Bits a weight | Gaussian, % | Student t5, % |\n|---|---|---|---|")
    for name, bits, results in sorted(rows, key=lambda row: -row[1]):
        errors = [error_percent(result, weight) for result, weight in zip(results, weights, strict=True)]
        print(f"| {name} | {bits:.2f} | {errors[0]:.2f} | {errors[1]:.2f} |")


if __name__ == "__main__":
    typer.run(main)
