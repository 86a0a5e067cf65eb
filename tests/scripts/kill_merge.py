"""Kill a merge 30 times at random moments: `python tests/scripts/kill_merge.py [--format same] [--kills 30]`.

A checkpoint of about 0.4 GB and an adapter are made here and merged once without interruption. Then merges are killed
with SIGKILL and run again, until there were enough kills. A killed one must leave no OUT; every OUT that gets finished
must hold the same bytes as the uninterrupted one. Exits 1 when that is not so. Each run of the command is a fork of a
process that has imported all, so that kills hit the merge and not the imports. The clock jumps all the while, an hour
back or forth, and so do the times of what was written.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from killing import JumpingTimes, hashes, start, wait

sys.path.insert(0, str(Path(__file__).parents[1]))

SIZES = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 8,
}


def make(base: Path, adapter: Path, hidden_size: int) -> None:
    """Write checkpoint and adapter."""
    import torch
    from merging import write_adapter
    from tiny import write_checkpoint

    torch.set_default_dtype(torch.bfloat16)
    write_checkpoint("qwen3moe", base, **SIZES | {"hidden_size": hidden_size})
    torch.set_default_dtype(torch.float32)
    write_adapter(base, adapter)


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--format", default="same")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--hidden-size", type=int, default=SIZES["hidden_size"], help="less of it on a slow machine")
    options = parser.parse_args()
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        base, adapter, whole, out = (Path(folder) / name for name in ("base", "adapter", "whole", "out"))
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(base, adapter, options.hidden_size))
        maker.start()
        maker.join()
        import ktft.adapters.merge
        import ktft.cli.merge  # noqa: F401  # with all of torch, transformers and peft

        given = ("merge", "--format", options.format, "--no-check", str(base), str(adapter))
        begin = time.monotonic()
        if status := wait(start(*given, str(whole)), float("inf")):
            sys.exit(f"the uninterrupted merge exited with {status}")
        total, expected = time.monotonic() - begin, hashes(whole)
        print(f"seed {seed}; {options.format}: uninterrupted {total:.1f} s, {len(expected)} files", flush=True)
        kills = finished = half_written = 0
        staging = out.with_name("out.merging")
        times = JumpingTimes(Path(folder), "out.merging/**/*", chance)
        while kills < options.kills or staging.exists():
            times.touch()
            child, moment = start(*given, str(out), jumping=True), chance.uniform(0, total)
            status = wait(child, moment if kills < options.kills else float("inf"))
            if status is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                kills += 1
                files, half = len(list(staging.rglob("*.safetensors"))), len(list(staging.rglob("*.ktft-tmp")))
                half_written += half
                print(f"kill {kills} after {moment:.2f} s: {files} files, {half} half written", flush=True)
            if not out.exists():
                if status is not None:
                    print(f"exit status {status}, and no OUT", flush=True)
                    return 1
                continue
            if hashes(out) != expected:
                print("finished: DIFFERENT", flush=True)
                return 1
            print("finished: the same bytes", flush=True)
            finished += 1
            shutil.rmtree(out)
        print(f"ok: {kills} kills, {half_written} files half written, {finished} merges with the same bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
