"""Install a wheel in a fresh environment that has no compiler, and train there with the demo's YAML.

    python tests/scripts/fresh_install.py WHEEL [--python python3.12] [--environment DIR] [--torch torch==2.13.0]

Needs a package index, and 2 GB on the disk. The commands are those of docs/guide/install.md. Programs see the new
environment's own folder as PATH, and a compiler that fails; pip may build nothing but the placeholders of `ci/stubs`,
which are Python. The demo runs with its tiny sizes from a copy, so that the checkout is not in reach.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STUBS = [str(ROOT / "ci" / "stubs" / name) for name in ("torchvision", "torchaudio")]


def run(command: list[str], environment: Path, scratch: Path, capture: bool = False) -> str:
    """Run a program of the environment. Returns its output, if captured; exits with 1 and its output if it fails."""
    print("$", *command, flush=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KTFT_"))}
    variables |= {"PATH": str(environment / "bin"), "CC": "/bin/false", "CXX": "/bin/false"}
    program = str(environment / "bin" / command[0])
    done = subprocess.run(
        [program, *command[1:]],
        cwd=scratch,
        env=variables,
        stdout=subprocess.PIPE if capture else None,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout or ''}\nFAILED: exit status {done.returncode}")
    return done.stdout or ""


def check(wheel: Path, environment: Path, scratch: Path, torch: str) -> dict[str, object]:
    """Install, ask, train. Returns what was found."""
    pip = ["python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--only-binary=:all:"]
    run([*pip, torch, *STUBS, f"{wheel}[llamafactory]"], environment, scratch)
    home = "import ktft, ktft_autoload, ktft._C as core; print(ktft.__file__, ktft_autoload.__file__, core.__file__)"
    files = run(["python", "-c", home], environment, scratch, capture=True).split()
    outside = [file for file in files if not Path(file).is_relative_to(environment)]
    if outside:
        sys.exit(f"FAILED: imported from elsewhere than the environment: {', '.join(outside)}")
    print(run(["ktft", "version"], environment, scratch, capture=True))
    checks = json.loads(run(["ktft", "doctor", "--json"], environment, scratch, capture=True))
    shutil.copytree(ROOT / "examples", scratch / "examples")
    out = scratch / "demo"
    run(["python", "examples/demo/run.py", "--quick", "--out", str(out)], environment, scratch)
    trained = json.loads((out / "summary.json").read_text())
    return {
        "wheel": wheel.name,
        "isa": next(row["value"] for row in checks if row["check"] == "isa"),
        "heldout_loss": trained["heldout_loss"],
    }


def main() -> None:
    """Make the environment and check the wheel in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", default=sys.executable, help="Of the wheel's version. [the one that runs this]")
    parser.add_argument("--environment", type=Path, help="New folder for it, which stays. [a temporary one]")
    parser.add_argument("--torch", default="torch==2.13.0", help="What to ask pip for. [%(default)s]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        environment = (args.environment or scratch / "environment").resolve()
        if environment.exists():
            parser.error(f"{environment} exists: a fresh environment is wanted")
        subprocess.run([args.python, "-m", "venv", str(environment)], check=True)
        print(json.dumps(check(args.wheel.resolve(), environment, scratch, args.torch), indent=1))


if __name__ == "__main__":
    main()
