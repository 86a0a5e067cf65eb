"""Measure how much of a LoRA delta survives a merge: `python tests/scripts/delta_survival.py [SIZE]`.

Gaussian weights of SIZE x SIZE (2048 by default) are stored in each format and get deltas of rank 8, with 0.1 to 3% of
their norm. Prints the table of docs/guide/merge.md: lost, projection and relative error, rounded to nearest and, where
the merge can choose, dithered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from packing import round_trip
from quantize import fp8, int4, mxfp4

from ktft.adapters.merge_survival import Survival
from ktft.checkpoint.addition import add
from ktft.checkpoint.schemes import PLAIN_SCHEME, Fp8, Mxfp4, PackedInt4, Scheme

RANK, SIZES = 8, (0.001, 0.003, 0.01, 0.03)
Moved = Callable[[Tensor, torch.Generator | None], Tensor]


def stored(scheme: Scheme, tensors: dict[str, Tensor]) -> Moved:
    """A function from a delta to the change that adding it makes to a stored weight."""
    base = scheme.decode(tensors).dequantize()
    return lambda delta, dither: scheme.decode(add(scheme, tensors, delta, dither)).dequantize() - base


def packed(weight: Tensor, expert_format: str) -> Moved:
    """The same for a bf16 weight that is packed after the addition."""
    base = round_trip(expert_format, weight)
    return lambda delta, _: round_trip(expert_format, weight.float() + delta) - base


def main() -> None:
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(size, size, generator=generator) * 0.02
    a, b = (torch.randn(*shape, generator=generator) for shape in ((RANK, size), (size, RANK)))
    inputs = torch.linalg.qr(a.T).Q
    int4_tensors, fp4 = int4(weight)[0], mxfp4(weight)[0]
    roles = {role: int4_tensors["weight" + part.suffix] for role, part in PackedInt4.parts.items()}
    block = fp8(weight)[0]
    cases: dict[str, tuple[Moved, bool]] = {
        "bf16": (stored(PLAIN_SCHEME, {"codes": weight.bfloat16()}), True),
        "FP8 blocks": (stored(Fp8(), {"codes": block["weight"], "scales": block["weight_scale_inv"]}), True),
        "INT4 groups of 32": (stored(PackedInt4(), roles), True),
        "MXFP4": (stored(Mxfp4(), {"codes": fp4["blocks"], "scales": fp4["scales"]}), True),
        **{f"`{name}` from bf16": (packed(weight.bfloat16(), name), False) for name in ("int8", "fp8", "k4", "int4")},
    }
    print("| Stored as | Delta, % | Nearest: lost, % | projection | error | Dithered: lost, % | projection | error |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (moved, choice) in cases.items():
        for share in SIZES:
            delta = b @ a
            delta *= share * weight.norm() / delta.norm()
            cells = []
            for dither in (None, torch.Generator().manual_seed(1)) if choice else (None,):
                found = Survival.measure(delta, moved(delta, dither), inputs)
                cells += [f"{100 * found.lost:.1f}", f"{found.projected:.3f}", f"{found.relative_error:.2f}"]
            print(f"| {name} | {100 * share:g} | {' | '.join(cells + [''] * (6 - len(cells)))} |", flush=True)


if __name__ == "__main__":
    main()
