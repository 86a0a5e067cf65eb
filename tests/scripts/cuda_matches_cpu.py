"""Train with the demo's YAML twice, hidden states on the CPU and on CUDA, and compare the logged losses.

    python tests/scripts/cuda_matches_cpu.py [KEY=VALUE ...]

Needs a GPU and the demo's model (`make demo`, or `python examples/demo/run.py`). Arguments override keys of the YAML
in both runs. Exits 1 if a logged loss differs by more than the tolerance.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

TOLERANCE = 0.01  # relative, for the loss of every logged step
ROOT = Path(__file__).resolve().parents[2]
YAML = ROOT / "examples" / "yaml" / "kt_deepseek_lora.yaml"


def losses(use_cpu: bool, overrides: list[str], folder: Path) -> dict[int, float]:
    """The loss that LLaMA-Factory logged, by step."""
    command = [sys.executable, "-m", "llamafactory.cli", "train", str(YAML), f"output_dir={folder}"]
    command += [f"use_cpu={str(use_cpu).lower()}", "plot_loss=false", *overrides]
    subprocess.run(command, cwd=ROOT, check=True)
    lines = (folder / "trainer_log.jsonl").read_text().splitlines()
    return {entry["current_steps"]: entry["loss"] for entry in map(json.loads, lines) if entry.get("loss") is not None}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        cpu, cuda = (losses(on_cpu, sys.argv[1:], Path(scratch, str(on_cpu))) for on_cpu in (True, False))
    assert cpu.keys() == cuda.keys(), (sorted(cpu), sorted(cuda))
    worst = 0.0
    for step in sorted(cpu):
        difference = abs(cuda[step] - cpu[step]) / cpu[step]
        worst = max(worst, difference)
        print(f"step {step:5d}  CPU {cpu[step]:.4f}  CUDA {cuda[step]:.4f}  {difference:.3%}")
    print(f"{len(cpu)} losses, largest difference {worst:.3%}, tolerance {TOLERANCE:.0%}")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
