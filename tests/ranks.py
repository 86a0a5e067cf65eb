"""Starts several processes that train together, by torchrun, on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}


def torchrun(processes: int, *command: object, timeout: float = 300, **environment: str) -> tuple[int, str]:
    """Exit status and output of a program that `processes` processes run together; 1 runs it without torchrun."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*(launcher if processes > 1 else [sys.executable]), *map(str, command)],
        env=os.environ | ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return done.returncode, done.stdout


def run_jobs(processes: int, folder: Path, *jobs: dict[str, Any], **environment: str) -> tuple[int, str]:
    """Run these jobs of `rank_program.py` one after another."""
    file = folder / f"jobs-{processes}.json"
    file.write_text(json.dumps(jobs))
    return torchrun(processes, TESTS / "rank_program.py", file, **environment)


def results(output: Path) -> dict[str, Any]:
    """What the run in this folder wrote of itself."""
    found: dict[str, Any] = json.loads((output / "losses.json").read_text())
    return found
