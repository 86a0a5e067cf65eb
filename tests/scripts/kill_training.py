"""Kill training runs at random moments: `python tests/scripts/kill_training.py [--kills 30] [--cli 6] [--seed N]`.

LLaMA-Factory trains a small model with a checkpoint every second step, once without interruption. Then runs are killed
with SIGKILL after a random number of checkpoints, two thirds of them while the next one is being written, and started
again with the same settings, until `--kills` were killed. Every run that ends must have the losses, the adapter and the
optimizer's state of the uninterrupted one; every checkpoint must always be whole, and the newest must never disappear.
Exits 1 otherwise. Between saves the clock and the times of checkpoints jump by an hour back or forth.

A run is a fork of a process that has done all imports, so that kills hit training itself; the first `--cli` kills hit
`llamafactory-cli train`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from killing import JumpingTimes, jump_clock, kill, wait

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

STEPS, SAVE_STEPS = 12, 2
STATE = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def settings(folder: Path) -> dict[str, Any]:
    """LLaMA-Factory's settings. Writes the model and the data to `folder`."""
    from tiny import factory_settings, write_checkpoint, write_data

    own = {
        "lora_dropout": 0.1,
        "kt_config": {"expert_format": "int8", "threads": 1},
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "max_steps": STEPS,
        "save_steps": SAVE_STEPS,
        "save_total_limit": 2,
        "logging_steps": 3,
    }
    return factory_settings(
        write_checkpoint("dsv3", folder / "model"), write_data(folder / "data"), folder / "output", **own
    )


def start(config: dict[str, Any], log: Path, *, cli: bool) -> int:
    """Start or continue a run. Returns its process id."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if cli:
        path = log.with_suffix(".yaml")
        path.write_text(json.dumps(config))  # which is YAML
        command = [str(Path(sys.executable).parent / "llamafactory-cli"), "train", str(path)]
        child = subprocess.Popen(command, stdout=target, stderr=target).pid
        os.close(target)
        return child
    from llamafactory.train.tuner import run_exp

    child = os.fork()
    if child:
        os.close(target)
        return child
    status = 99
    try:
        os.dup2(target, 1)
        os.dup2(target, 2)
        jump_clock()
        run_exp(config)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def result(output: Path) -> dict[str, Any]:
    """What every run must end with: losses, the final adapter and the state of the last checkpoint."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    files = {name: (output / f"checkpoint-{STEPS}" / name).read_bytes() for name in STATE}
    losses = [(e["step"], e.get("loss"), e.get("grad_norm"), e.get("train_loss")) for e in history]
    return {**files, "losses": losses, "final adapter": (output / "adapter_model.safetensors").read_bytes()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--cli", type=int, default=6, help="kills of llamafactory-cli train")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["HF_DATASETS_CACHE"] = str(folder / "cache")
        return hunt(folder, settings(folder), options.kills, options.cli, chance, options.seed)


def hunt(folder: Path, config: dict[str, Any], kills: int, by_cli: int, chance: random.Random, seed: int) -> int:
    """Run, kill, run again and compare. Returns the exit status."""
    from ktft.train.checkpoints import STAGING
    from ktft.train.manifest import checkpoints, damage

    whole, output, log = folder / "whole", folder / "output", folder / "log"
    took: dict[bool, float] = {}
    for cli in (False, True):
        shutil.rmtree(whole, ignore_errors=True)
        begin = time.monotonic()
        if status := wait(start(config | {"output_dir": str(whole)}, log, cli=cli), float("inf")):
            sys.exit(f"the uninterrupted run exited with {status}:\n{log.read_text()[-5000:]}")
        took[cli] = time.monotonic() - begin
    expected = result(whole)
    print(f"seed {seed}; uninterrupted {took[False]:.1f} s, llamafactory-cli {took[True]:.1f} s", flush=True)

    times = JumpingTimes(output, "checkpoint-*", chance)

    def newest() -> int:
        times.touch()
        return max((int(path.name.split("-")[1]) for path in checkpoints(output)), default=0)

    def saving() -> bool:
        return any((output / STAGING).glob("checkpoint-*"))

    done = half = finished = resumed = 0
    while done < kills or output.exists():
        last, cli, begun = done >= kills, done < by_cli, newest()
        child = start(config | {"output_dir": str(output)}, log, cli=cli and not last)
        seen = begun
        after = STEPS + 1 if last else chance.randrange(begun, STEPS + 1, SAVE_STEPS)

        def reached(after: int = after) -> bool:
            nonlocal seen
            seen = max(seen, newest())
            return seen >= after

        status = wait(child, float("inf"), reached)
        if status is None and chance.random() < 2 / 3:  # wait for the next save, and a little longer
            status = wait(child, float("inf"), saving)
            status = wait(child, chance.uniform(0, 0.05)) if status is None else status
        elif status is None:
            status = wait(child, chance.uniform(0, took[cli] / 4))
        resumed += begun > 0
        if status is None:
            kill(child)
            done, half, now = done + 1, half + saving(), checkpoints(output)
            print(f"kill {done}: {', '.join(p.name for p in now) or 'none'}{', while saving' * saving()}", flush=True)
            if newest() < seen:
                print(f"LOST: checkpoint-{seen} was there, checkpoint-{newest()} is the newest now")
                return 1
            if bad := [problem for path in now if (problem := damage(path))]:
                print("NOT WHOLE:", bad)
                return 1
            continue
        different = [key for key, value in (result(output) if status == 0 else {}).items() if value != expected[key]]
        if status or different:
            print(f"DIFFERENT: {different}, exit status {status}\n{log.read_text()[-5000:]}")
            return 1
        finished += 1
        print("finished: losses, adapter and optimizer are the same", flush=True)
        shutil.rmtree(output)
    print(f"ok: {done} kills, {half} while saving; {resumed} runs resumed, {finished} runs ended with the same result")
    return 0


if __name__ == "__main__":
    sys.exit(main())
