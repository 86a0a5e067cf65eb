"""A GPU that runs out of memory in the middle of a run: `python tests/scripts/cuda_out_of_memory.py --directory DIR`.

`llamafactory-cli train` trains layers of Qwen3-30B-A3B's shape on sequences of which the last are 16 times as long as
the first. A first run has all the memory and says how much short and long sequences take. Then the process may take
what lies between the two, by torch's own limit, and once more because another process fills the GPU. Each time the
long sequence must end the run with what takes the GPU's memory, one change, and the last checkpoint, from which a run
with all the memory must go on to the losses of the first one. At last there is too little memory for anything. Exits 1
if one of these does not hold.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import string
import subprocess
import sys
from pathlib import Path

import torch
import train_large
import yaml
from measuring import attempt, end, part

SHORT, LONG = 1024, 16384
SAVED, STEPS = 4, 6
CONTEXT = 1 << 30  # bytes of the driver and of libraries, beside torch's own
FULL = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
taken = torch.empty(free - int(float(sys.argv[1])), dtype=torch.uint8, device="cuda")
print("taken", flush=True)
sys.stdin.read()
"""
"""Takes the GPU's memory but for so many bytes, until its input ends."""
ALLOWED = 0.01  # of a loss: sums on a GPU have no fixed order


def write_data(path: Path) -> None:
    """Sequences in the order in which they are trained on."""
    path.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    lengths = [SHORT] * SAVED + [LONG] * (STEPS - SAVED)
    answers = ["".join(draw.choices(string.ascii_letters, k=length)) for length in lengths]
    samples = [{"instruction": "count", "input": "", "output": text} for text in answers]
    (path / "sft.json").write_text(json.dumps(samples))
    (path / "dataset_info.json").write_text(json.dumps({"sft": {"file_name": "sft.json"}}))


def run(args: argparse.Namespace, root: Path, name: str, vram: float, **own: object) -> tuple[int, str, Path]:
    """Train in a process with so many bytes of GPU memory. Returns its exit status, what it printed and its output."""
    out = root / name
    settings = train_large.settings(args, root) | {
        "output_dir": str(out), "save_strategy": "steps", "save_steps": SAVED, "disable_shuffling": True, **own,
    }  # fmt: skip
    path = root / f"{name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-c", train_large.CAPPED, str(vram), "train", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, out


def losses_of(out: Path) -> list[float]:
    """The loss of each step, of a resumed run too."""
    history = json.loads((out / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def expect_table(name: str, status: int, text: str, checkpoint: Path) -> None:
    """The run ended as it should; prints what it said."""
    said = text[text.rfind("OutOfMemoryError:") :]
    print(f"{name}: exit status {status}\n{said.strip()}", flush=True)
    for words in ("What takes the GPU's memory", "To go on, ", str(checkpoint.name)):
        assert words in said, f"{name} does not say {words!r}:\n{text[-3000:]}"
    assert status, f"{name} ended with status 0"


def expect_resumed(args: argparse.Namespace, root: Path, checkpoint: Path, expected: list[float]) -> None:
    """A run with all the memory goes on from the checkpoint to the losses of the first run."""
    status, text, out = run(
        args, root, f"{checkpoint.parent.name}-resumed", 1e15, resume_from_checkpoint=str(checkpoint)
    )
    assert status == 0, text[-3000:]
    losses = losses_of(out)
    print(f"resumed from {checkpoint.name}: losses {losses}, without a break {expected}", flush=True)
    assert all(abs(a / b - 1) < ALLOWED for a, b in zip(losses, expected, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6)
    asked = parser.parse_args()
    root = asked.directory
    settings = ["--setting=micro_batches_together: 1", "--gpu-expert-memory=0", "--placement=stream"]
    sizes = ["--layers", str(asked.layers), "--cutoff", str(LONG), "--steps", str(STEPS)]
    args = train_large.arguments(["--directory", str(root), *sizes, *settings])
    train_large.write_checkpoint(args, root / "model")
    write_data(root / "data")
    with part("all the memory"):
        status, text, out = run(args, root, "whole", 1e15)
        assert status == 0, text[-3000:]
        taken = json.loads((out / "ktft_report.json").read_text())["steps"]["gpu_bytes"]
        losses = losses_of(out)
        print(f"most GPU memory of each step, GB: {[round(each / 1e9, 2) for each in taken]}")
    between = (taken[SAVED - 1] + max(taken)) / 2
    with part(f"no more than {between / 1e9:.2f} GB"):
        status, text, out = run(args, root, "limited", between)
        expect_table("limited", status, text, out / f"checkpoint-{SAVED}")
        expect_resumed(args, root, out / f"checkpoint-{SAVED}", losses)
    with part("another process fills the GPU"):
        other = subprocess.Popen(
            [sys.executable, "-c", FULL, str(between + CONTEXT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert other.stdout is not None and other.stdout.readline() == b"taken\n"
        with attempt("full"):
            status, text, out = run(args, root, "full", 1e15)
            expect_table("full", status, text, out / f"checkpoint-{SAVED}")
        other.communicate(b"")
    with part("too little for anything"):
        status, text, _ = run(args, root, "nothing", 5e8)
        print("\n".join(text.strip().splitlines()[-12:]))
        assert status and "memory" in text.strip().splitlines()[-1]
    shutil.rmtree(root / "model")
    end()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("this script needs a GPU")
    main()
