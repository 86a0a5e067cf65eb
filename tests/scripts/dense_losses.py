"""What each format of dense weights costs a run: `python tests/scripts/dense_losses.py`, after `make demo`.

The demo's model is trained anew through `llamafactory-cli` and examples/yaml/kt_deepseek_lora.yaml for each format of
dense weights and of experts, with one seed; in bf16 also with two more, which shows how far runs differ by chance. The
record is docs/benchmarks/dense-formats.json. A run whose result is there under --out is not run again.
"""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "demo"))

import dataset
import factory
import samples
import torch
from scale import Scale
from transformers import AutoModelForCausalLM, AutoTokenizer

import ktft
from ktft.config import DENSE_FORMATS

ROOT = Path(__file__).resolve().parents[2]
SEEDS = (42, 43, 44)  # the first is the YAML's
LAST = 10  # steps whose mean is a run's training loss
COLUMNS = {
    "dense": "dense weights",
    "experts": "experts",
    "seed": "seed",
    "train_loss": f"loss, last {LAST} steps",
    "heldout_loss": "held-out loss",
    "right": "right answers of 64",
}


def trained(demo: Path, out: Path, steps: int, dense: str, experts: str, seed: int) -> dict[str, Any]:
    """Train once. Returns the losses, the number of right answers and the seconds of training."""
    settings = {
        "model_name_or_path": demo / "model",
        "dataset_dir": demo / "data",
        "output_dir": out,
        "kt_config.dense_format": dense,
        "kt_config.expert_format": experts,
        "seed": seed,
        "max_steps": steps,
        "logging_steps": 1,
        "save_steps": steps,
        "eval_strategy": "'no'",  # which YAML would take for false
        "eval_on_start": "false",
        "plot_loss": "false",
    }
    begin = time.perf_counter()
    factory.train([f"{name}={value}" for name, value in settings.items()], out.with_suffix(".log"))
    seconds = time.perf_counter() - begin
    history = json.loads((out / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    if len(losses) != steps:
        raise RuntimeError(f"{out} has the losses of {len(losses)} steps, not of {steps}")
    return {
        "train_loss": round(statistics.mean(losses[-LAST:]), 4),
        "heldout_loss": round(factory.eval_loss(out), 4),
        "right": right_answers(demo, out, dense, experts),
        "seconds": round(seconds, 1),
    }


def right_answers(demo: Path, adapter: Path, dense: str, experts: str) -> int:
    """How many held-out functions the trained model describes with the right sentence, as the demo counts them."""
    scale = Scale()
    tokenizer = AutoTokenizer.from_pretrained(demo / "model", padding_side="left")
    config = ktft.KtftConfig(expert_format=experts, dense_format=dense)
    base: Any = AutoModelForCausalLM.from_pretrained(demo / "model", quantization_config=config, dtype=torch.float32)
    records = dataset.read(demo / "data", "heldout")[: scale.prompts]
    answers = samples.answers_of(ktft.load_adapter(base, adapter), tokenizer, records, scale.answer_tokens)
    return sum(answer == record["output"] for answer, record in zip(answers, records, strict=True))


def write_record(path: Path, rows: list[dict[str, Any]], machine: str) -> None:
    """A record as docs/tables.py reads it, with a row on a line."""
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
    head = {
        "commands": ["make demo", f"python tests/scripts/{Path(__file__).name}"],
        "machine": machine,
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
        "commit": commit,
        "columns": COLUMNS,
    }
    body = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    path.write_text(f'{json.dumps(head, indent=2)[:-2]},\n  "rows": [\n{body}\n  ]\n}}\n', encoding="utf-8")


def main(
    demo: Annotated[Path, typer.Option(help="The folder that `make demo` filled.")] = factory.YAML_OUT,
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = ROOT / "build" / "dense_losses",
    record: Annotated[Path, typer.Option()] = ROOT / "docs" / "benchmarks" / "dense-formats.json",
    machine: Annotated[str, typer.Option(help="A sentence about this machine, for the record.")] = "",
    steps: Annotated[int, typer.Option(min=LAST)] = 200,
    experts: Annotated[str, typer.Option(help="Formats of experts.")] = "bf16,int8,k4",
) -> None:
    """Train all combinations, and write the record."""
    if not (demo / "model" / "config.json").is_file():
        sys.exit(f"{demo} has no model: run `make demo` first")
    runs = [("bf16", "bf16", seed) for seed in SEEDS]
    runs += [(dense, each, SEEDS[0]) for each in experts.split(",") for dense in DENSE_FORMATS]
    rows = []
    for dense, each, seed in dict.fromkeys(runs):
        name = f"{dense}-{each}-{seed}-{steps}"
        result = out / f"{name}.json"
        if not result.exists():
            out.mkdir(parents=True, exist_ok=True)
            result.write_text(json.dumps(trained(demo, out / name, steps, dense, each, seed)), encoding="utf-8")
        rows.append({"dense": dense, "experts": each, "seed": seed} | json.loads(result.read_text(encoding="utf-8")))
        print(json.dumps(rows[-1]), flush=True)
    write_record(record, rows, machine)


if __name__ == "__main__":
    typer.run(main)
