"""Kill a conversion 20 times at random moments: `python tests/scripts/kill_convert.py [FORMAT]`.

A checkpoint of about 0.8 GB is made here and converted once without interruption. Then conversions are killed with
SIGKILL and run again, until there were 20 kills. Every directory that gets finished must hold the same bytes as the
uninterrupted one. Exits 1 when one does not. Each run of the command is a fork of a process that has imported all,
so that kills hit the conversion and not the imports.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from killing import hashes, start, wait

sys.path.insert(0, str(Path(__file__).parents[1]))

KILLS = 20
SIZES = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 8,
}


def make(path: Path) -> None:
    """Write the checkpoint."""
    import torch
    from tiny import write_checkpoint

    torch.set_default_dtype(torch.bfloat16)
    write_checkpoint("qwen3moe", path, **SIZES)


def main() -> int:
    """Returns the exit status."""
    expert_format = sys.argv[1] if len(sys.argv) > 1 else "k4"
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        source, whole, target = (Path(folder) / name for name in ("source", "whole", "target"))
        maker = multiprocessing.get_context("spawn").Process(target=make, args=(source,))
        maker.start()
        maker.join()
        import ktft.checkpoint.check
        import ktft.cli.convert
        import ktft.model.outline  # noqa: F401  # with all of torch and transformers

        given = ("--format", expert_format)
        begin = time.monotonic()
        if status := wait(start("convert", str(source), str(whole), *given), float("inf")):
            sys.exit(f"the uninterrupted conversion exited with {status}")
        total, expected = time.monotonic() - begin, hashes(whole)
        print(f"seed {seed}; {expert_format}: uninterrupted {total:.1f} s, {len(expected)} files", flush=True)
        kills = finished = half_written = 0
        while kills < KILLS or target.exists():
            child, moment = start("convert", str(source), str(target), *given), chance.uniform(0, total)
            status = wait(child, moment if kills < KILLS else float("inf"))
            if status is None:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                kills += 1
                layers, half = len(list(target.glob("experts/*.safetensors"))), len(list(target.rglob("*.ktft-tmp")))
                half_written += half
                print(f"kill {kills} after {moment:.2f} s: {layers} layers, {half} files half written", flush=True)
                continue
            same = status == 0 and hashes(target) == expected
            print("finished:", "the same bytes" if same else f"DIFFERENT, exit status {status}", flush=True)
            if not same:
                return 1
            finished += 1
            shutil.rmtree(target)
        print(f"ok: {kills} kills, {half_written} files half written, {finished} conversions with the same bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
