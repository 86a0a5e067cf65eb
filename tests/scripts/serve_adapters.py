"""Throughput of a server whose requests name several adapters, beside the same server with one adapter, or the base.

    python tests/scripts/serve_adapters.py --shape qwen3-30b-a3b --layers 3 --adapters 8 --clients 8

Writes a checkpoint of a real model's layers and adapters of one rank on all their layers, and serves them with the
`ktft serve` of this environment. Rounds of one adapter, of all adapters and of the base take turns, so that other load
on the machine meets all three. Prints medians and what part of one adapter's throughput all of them have.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
from adapters import random_adapter

from benchmarks.serve.cases import Job, Load
from benchmarks.serve.checkpoint import write_checkpoint
from benchmarks.serve.client import Client
from benchmarks.serve.run import decode_rate
from benchmarks.serve.servers import ROWS, Process
from benchmarks.step.cases import parse_step_shape


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[Client]:
    """A client of a server with the base, as `base`, and the adapters, as `a0`, `a1`, ..."""
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        base = write_checkpoint(parse_step_shape(args.shape), args.layers, Path(scratch) / "base")
        options = ["--served-model-name", "base", "--max-adapters", str(args.adapters)]
        for number in range(args.adapters):
            path = random_adapter(base, Path(scratch) / f"a{number}", std=0.02, seed=number, r=args.rank)
            options += ["--adapter", str(path)]
        length = args.prompt_tokens + args.output_tokens
        options += ["--max-model-len", str(length), "--max-num-seqs", str(args.clients), *args.option]
        job = Job(base, None, args.clients, length, tuple(options), args.threads)
        with Process(ROWS["ktft"], job, str) as process:
            yield process.client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b", help="as of ktft bench serve")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--folder", help="where checkpoint and adapters are written for the time being")
    parser.add_argument("--option", action="append", default=[], help="further option of ktft serve; repeatable")
    args = parser.parse_args()
    load = Load(args.clients, args.prompt_tokens, args.output_tokens)
    every = tuple(f"a{number}" for number in range(args.adapters))
    cases = {"base": ("base",), "one adapter": every[:1], f"{args.adapters} adapters": every}
    rates: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    with serving(args) as client:
        for turn in range(-1, args.rounds):  # the first is not counted
            for number, (name, models) in enumerate(cases.items()):
                client.models = models
                found = client.round(load, seed=3 * turn + number + 3)
                prefill = sum(t.prompt_tokens for t in found) / max(t.arrivals[0] for t in found)
                output = sum(len(t.arrivals) for t in found) / max(t.arrivals[-1] for t in found)
                if turn >= 0:
                    rates[name].append((prefill, decode_rate(found) or 0.0, output))
    print(f"{args.shape}, {args.layers} layers, rank {args.rank}, {args.clients} clients, {args.rounds} rounds; tok/s")
    medians = {name: [statistics.median(each) for each in zip(*found, strict=True)] for name, found in rates.items()}
    _, one, many = medians.values()
    for name, (prefill, decode, output) in medians.items():
        print(f"{name:12} prefill {prefill:8.1f}  decode {decode:8.1f}  output {output:8.1f}")
    ratios = [several / single for several, single in zip(many, one, strict=True)]
    print("all adapters over one: prefill {:.2f}, decode {:.2f}, output {:.2f}".format(*ratios))


if __name__ == "__main__":
    main()
