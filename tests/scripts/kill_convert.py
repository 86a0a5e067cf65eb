"""Kill a conversion 20 times at random moments: `python tests/scripts/kill_convert.py [FORMAT]`.

A checkpoint of about 0.8 GB is made and converted once without interruption. Then conversions are killed with SIGKILL
and run again, until 20 were killed. Every finished directory must hold the same bytes as the uninterrupted one; the
script exits 1 otherwise. Each run is a fork of a process that has done all imports, so that kills hit the conversion
itself. The clock jumps as in kill_merge.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from killing import hunt
from measuring import make_model

KILLS = 20


def make(folder: Path) -> None:
    make_model(folder / "base", 32, 8)


def main() -> int:
    import ktft.cli.convert
    import ktft.model.quantizer  # noqa: F401  # with all of torch and transformers

    expert_format = sys.argv[1] if len(sys.argv) > 1 else "k4"
    return hunt(("convert", "--format", expert_format, "{folder}/base"), "out", KILLS, make)


if __name__ == "__main__":
    sys.exit(main())
