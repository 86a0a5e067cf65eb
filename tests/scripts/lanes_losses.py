"""Train the same small model in each lane and compare the losses: `python tests/scripts/lanes_losses.py`.

LLaMA-Factory's `run_exp` trains a tiny checkpoint of a real architecture, with LoRA on all layers and dropout, once for
each placement and with the same seed; on a GPU if there is one, else set KTFT_EMULATE_GPU=1. Prints each run's losses
(means of five steps) and their largest difference from those of `cpu`; exits 1 if that is over 0.5%.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from llamafactory.train.tuner import run_exp
from tiny import factory_settings, write_checkpoint, write_data

LIMIT = 0.005
PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"placement": "cpu"},
    "stream": {"placement": "stream"},
    "resident": {"placement": "resident", "gpu_expert_memory": "64M"},
    "auto": {"placement": "auto"},
}


def losses(folder: Path, name: str, family: str, steps: int, kt_config: dict[str, Any]) -> list[float]:
    """Train once. Returns the logged losses."""
    out = folder / name
    own = {
        "lora_rank": 8,
        "lora_dropout": 0.1,
        "kt_config": kt_config,
        "cutoff_len": 128,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-4,
        "max_steps": steps,
        "logging_steps": 5,
        "bf16": torch.cuda.is_available(),
        "use_cpu": not torch.cuda.is_available(),
        "save_strategy": "no",
    }
    run_exp(factory_settings(folder / family, folder / "data", out, **own))
    state = json.loads((out / "trainer_state.json").read_text())
    return [row["loss"] for row in state["log_history"] if "loss" in row]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="dsv3", help="qwen3moe, dsv2 or dsv3")
    parser.add_argument("--format", default="int8")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_checkpoint(args.family, folder / args.family)
        write_data(folder / "data")
        for placement, kt_config in PLACEMENTS.items():
            settings = {"expert_format": args.format, **kt_config}
            found[placement] = losses(folder, placement, args.family, args.steps, settings)
    worst = 0.0
    for placement, values in found.items():
        apart = max(abs(a - b) / abs(b) for a, b in zip(values, found["cpu"], strict=True))
        worst = max(worst, apart)
        print(f"{placement:9s} {len(values)} losses, {values[0]:.4f} to {values[-1]:.4f}, {apart:.4%} from cpu's")
    print(f"{'OK' if worst <= LIMIT else 'FAILED'}: {worst:.4%}, at most {LIMIT:.1%}")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
