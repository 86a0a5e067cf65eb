r"""Few tokens through a layer's experts on the CPU: inference beside training's forward and beside reading weights.

    python tests/scripts/few_rows.py [--formats k4 int8] [--tokens 1 2 4 8 16] [--layers 16] [--threads N]

`inference` takes one phase where the kernels choose that, as on many threads; `training` keeps the routes for a
backward, which never does. The phases that are printed say which it was. Both take turns in one process, with other
experts each time, in so many layers that no cache holds them. Prints medians of a layer, and the time that reading the
experts in use takes at the rate that the same threads read at.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from measuring import random_layer

from ktft import native
from ktft.native.machine import StreamedMemory

WAYS = {"inference": "none", "training": "recompute"}


def pass_through(layers: list[Any], experts: int, top_k: int, tokens: int, keep: str) -> tuple[float, int]:
    """Seconds of a pass through the layers, and the experts that it used."""
    index = [torch.stack([torch.randperm(experts)[:top_k] for _ in range(tokens)]) for _ in layers]
    x, weights = torch.randn(tokens, layers[0].hidden_size).bfloat16(), torch.rand(tokens, top_k)
    began = time.perf_counter()
    for layer, chosen in zip(layers, index, strict=True):
        layer.forward(x, chosen, weights, None, keep)
    return time.perf_counter() - began, sum(len(each.unique()) for each in index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="128,8,2048,768", help="experts, top_k, hidden, intermediate [%(default)s]")
    parser.add_argument("--formats", nargs="+", default=["k4", "int8"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--turns", type=int, default=12)
    args = parser.parse_args()
    experts, top_k, hidden, intermediate = map(int, args.shape.split(","))
    runtime = native.runtime(args.threads)
    memory = StreamedMemory(runtime, 1 << 30)
    torch.manual_seed(0)
    for fmt in args.formats:
        layers = [random_layer(runtime, fmt, experts, hidden, intermediate) for _ in range(args.layers)]
        for tokens in args.tokens:
            seconds: dict[str, list[float]] = {way: [] for way in WAYS}
            phases: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
            bounds = []
            for _ in range(args.turns):
                rate = memory.read()
                for way, keep in WAYS.items():
                    runtime.take_phases()
                    took, used = pass_through(layers, experts, top_k, tokens, keep)
                    seconds[way].append(took / len(layers))
                    for name, phase in runtime.take_phases().items():
                        phases[way].setdefault(name, []).append(1e6 * phase / len(layers))
                bounds.append(used * layers[0].packed_bytes / experts / rate / len(layers))
            ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
            bound = 1e6 * statistics.median(bounds)
            print(f"{fmt} T={tokens}: reading {bound:.0f} us, training / inference {ratio:.3f}")
            for way in WAYS:
                parts = ", ".join(f"{name} {statistics.median(each):.0f}" for name, each in phases[way].items())
                print(f"   {way:9} {1e6 * statistics.median(seconds[way]):6.0f} us  ({parts})", flush=True)


if __name__ == "__main__":
    main()
