"""Starts several processes that train together, on gloo: by torchrun, or without the imports of each one."""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forked import LIBRARIES, Forks

TESTS = Path(__file__).parent
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""}


def torchrun(processes: int, *command: object, **environment: str) -> tuple[int, str]:
    """Exit status and output of a program that `processes` processes run together; 1 runs it without torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return _python(*(launcher if processes > 1 else []), *command, **environment)


def _python(*command: object, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout


def run_jobs(processes: int, folder: Path, *jobs: dict[str, Any], **environment: str) -> tuple[int, str]:
    """Run these jobs of `rank_program.py` one after another, in forks: what torchrun itself does is not tested."""
    command = [str(TESTS / "rank_program.py"), str(_written(processes, folder, jobs)), str(processes)]
    done = _forks().run(command, os.environ | ENVIRONMENT | environment)
    return done.returncode, done.stdout


@functools.cache
def _forks() -> Forks:
    """A process that has imported what the program needs, once for all runs."""
    folder = tempfile.TemporaryDirectory(prefix="ktft-ranks-")
    beneath = Forks(Path(folder.name), LIBRARIES)
    forks = Forks(Path(folder.name), ["accelerate", "ktft", "rank_program"], beneath)
    for each in (folder.cleanup, beneath.close, forks.close):
        atexit.register(each)
    return forks


def torchrun_jobs(processes: int, folder: Path, *jobs: dict[str, Any]) -> tuple[int, str]:
    """The same by torchrun."""
    return torchrun(processes, TESTS / "rank_program.py", _written(processes, folder, jobs))


def _written(processes: int, folder: Path, jobs: Sequence[dict[str, Any]]) -> Path:
    file = folder / f"jobs-{processes}.json"
    file.write_text(json.dumps(jobs))
    return file


def results(output: Path) -> dict[str, Any]:
    """What the run in this folder wrote of itself."""
    found: dict[str, Any] = json.loads((output / "losses.json").read_text())
    return found
