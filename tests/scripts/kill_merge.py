"""Kill a merge 30 times at random moments: `python tests/scripts/kill_merge.py [--format same] [--kills 30]`.

A checkpoint of about 0.4 GB and an adapter are made and merged once without interruption. Then merges are killed with
SIGKILL and run again, until enough were killed. A killed merge must leave no OUT, and every finished OUT must hold the
same bytes as the uninterrupted one; the script exits 1 otherwise. Each run is a fork of a process that has done all
imports, so that kills hit the merge itself. All the while the clock and the times of written files jump by an hour
back or forth.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from killing import hunt
from measuring import make_model


def make(folder: Path, hidden_size: int) -> None:
    from merging import write_adapter

    make_model(folder / "base", 16, 4, hidden_size=hidden_size)
    write_adapter(folder / "base", folder / "adapter")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--format", default="same")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--hidden-size", type=int, default=1024, help="smaller for a slow machine")
    options = parser.parse_args()
    import ktft.adapters.merge
    import ktft.cli.merge  # noqa: F401  # with all of torch, transformers and peft

    command = ("merge", "--format", options.format, "--no-check", "{folder}/base", "{folder}/adapter")
    return hunt(command, "out.merging", options.kills, make, options.hidden_size)


if __name__ == "__main__":
    sys.exit(main())
