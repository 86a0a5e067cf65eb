"""Lets accelerate train with tensor parallelism on CPUs, which it refuses though gloo can do all it needs.

usage: tp_on_cpu.py SCRIPT ARGUMENTS...    runs a script so.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from accelerate import ParallelismConfig


def allow() -> None:
    """Make accelerate check a parallel layout against the number of processes only."""

    def check(layout: Any, accelerator: Any) -> None:
        assert layout.total_size in (1, accelerator.num_processes)

    ParallelismConfig._validate_accelerator = check


if __name__ == "__main__":
    allow()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
