"""`ktft bench`: the benchmarks of a checkout. The installed package does not hold them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import typer

CHECKOUT = Path(__file__).parents[2]


def add_to(app: typer.Typer) -> None:
    """Add the command `bench` of the checkout. Without a checkout, the command says where the benchmarks are."""
    if (CHECKOUT / "benchmarks" / "cli.py").is_file():
        sys.path.append(str(CHECKOUT))
        app.add_typer(importlib.import_module("benchmarks.cli").app, name="bench")
    else:
        app.command("bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(absent)


def absent() -> None:
    """Time ktft on this machine, from a checkout of its repository."""
    raise ValueError(
        f"the benchmarks are in ktft's repository and not in the installed package: {CHECKOUT} has no folder "
        "benchmarks. Clone the repository, run `make native` there, and use its .venv/bin/ktft"
    )
