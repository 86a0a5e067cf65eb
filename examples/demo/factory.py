"""Stage 5: LoRA, and evaluation of what it saved, both as a user runs them: `llamafactory-cli` and the example YAML."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
YAML = ROOT / "examples" / "yaml" / "kt_deepseek_lora.yaml"
YAML_OUT = ROOT / "build" / "demo"  # the folder that the YAML names


def folders(out: Path) -> list[str]:
    """Overrides for a demo outside of the YAML's own folder."""
    if out.resolve() == YAML_OUT:
        return []
    return [f"model_name_or_path={out / 'model'}", f"dataset_dir={out / 'data'}", f"output_dir={out / 'lora'}"]


def train(overrides: list[str], log: Path, show_from: str = "") -> None:
    """Runs `llamafactory-cli train` on the YAML with its output in `log`, and on the terminal once `show_from` came.

    Raises:
        RuntimeError: it failed; the message has the end of its output.
    """
    command = [str(Path(sys.executable).parent / "llamafactory-cli"), "train", str(YAML), *overrides]
    environment = {"OMP_WAIT_POLICY": "passive"} | os.environ  # idle threads of torch leave the cores to ktft's
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(log.parent / "cache"),
        "LLAMAFACTORY_VERBOSITY": "WARN",  # of its lines and transformers'; ktft's report is not among them
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("wb") as file,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process,
    ):
        assert process.stdout is not None
        shown = False
        while chunk := process.stdout.read1(4096):  # type: ignore[attr-defined]
            file.write(chunk)
            if show_from and not shown and (at := chunk.find(show_from.encode())) >= 0:
                chunk, shown = chunk[at:], True
            if shown:
                sys.stdout.buffer.write(chunk)
                sys.stdout.flush()
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
        raise RuntimeError(f"{' '.join(command)} exited with {process.returncode}; the end of {log}:\n{tail}")


def loss_at_start(folder: Path) -> float:
    """The loss of the evaluation before step 1 (`eval_on_start` of the YAML), when LoRA changes nothing yet."""
    history = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    return next(entry["eval_loss"] for entry in history if "eval_loss" in entry and entry["step"] == 0)


def eval_loss(folder: Path) -> float:
    """The loss of the evaluation that LLaMA-Factory wrote to `folder`."""
    return json.loads((folder / "eval_results.json").read_text(encoding="utf-8"))["eval_loss"]
