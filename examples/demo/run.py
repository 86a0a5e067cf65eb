"""The demo of `make demo`: a small MoE is made from nothing, learns with LoRA on int8 experts, and is checked.

Stages whose record exists under the output folder are not run again, so a demo that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import corpus
import dataset
import factory
import pretrain
import samples
import typer
from rich.console import Console
from rich.table import Table
from tokenizer import train_tokenizer
from transformers import PreTrainedTokenizerFast

RELOAD_TOLERANCE = 1e-3  # of the loss in a new process against the loss at the end of training
console = Console()


@dataclass(frozen=True)
class Scale:
    """Everything that differs between the demo and its quick form for tests."""

    corpus_bytes: int = 8_000_000
    vocab_size: int = 4096
    recipe: pretrain.Recipe = field(default_factory=pretrain.Recipe)
    model: dict[str, Any] = field(default_factory=dict)
    train_records: int = 4000
    heldout_records: int = 256
    yaml_overrides: tuple[str, ...] = ()
    sample_tokens: int = 40
    required_drop: float = 0.15  # of the held-out loss, as a fraction


QUICK = Scale(
    corpus_bytes=600_000,
    vocab_size=512,
    recipe=pretrain.Recipe(steps=20, max_seconds=10, batch_size=2, sequence_length=64),
    model={
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
    },
    train_records=64,
    heldout_records=16,
    yaml_overrides=(
        "max_steps=8",
        "eval_steps=4",
        "logging_steps=1",
        "warmup_steps=1",
        "learning_rate=5.0e-3",
        "cutoff_len=128",
    ),
    sample_tokens=4,
    required_drop=0.0,
)


class Stages:
    """Runs stages in order; each leaves a record, and is skipped if it has one that was made in the same way."""

    def __init__(self, out: Path, scale: Scale) -> None:
        """Records of another `scale` do not count."""
        self.out, self.made_with = out, json.loads(json.dumps(asdict(scale)))
        self.figures: dict[str, dict[str, Any]] = {}
        self.fresh = False  # a stage ran, so the records of all later ones are out of date

    def run(self, name: str, title: str, work: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
        """The figures of `work`, which fills the empty folder it is given."""
        folder, record = self.out / name, self.out / "records" / f"{name}.json"
        if not self.fresh and record.exists():
            stored = json.loads(record.read_text(encoding="utf-8"))
            if stored["made_with"] == self.made_with and folder.is_dir():
                console.print(f"[dim]{title}: done before, in {folder}[/]")
                self.figures[name] = stored["figures"]
                return stored["figures"]
        self.fresh = True
        console.rule(f"[bold]{title}", align="left")
        record.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        started = time.perf_counter()
        figures = work(folder)
        figures["seconds"] = round(time.perf_counter() - started, 1)
        write_json(record, {"made_with": self.made_with, "figures": figures})
        self.figures[name] = figures
        return figures


def write_json(path: Path, value: Any) -> None:
    """Writes a file that is either whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
    os.replace(partial, path)


def run_stages(out: Path, scale: Scale) -> Stages:
    """All stages, from the machine's own text to samples of the trained model."""
    stages = Stages(out, scale)
    overrides = [*factory.folders(out), *scale.yaml_overrides]

    def texts(split: str) -> list[str]:
        return [file["text"] for file in corpus.read(out / "corpus", split)]

    def make_tokenizer(folder: Path) -> dict[str, Any]:
        tokenizer = train_tokenizer(texts("train"), scale.vocab_size)
        tokenizer.save_pretrained(folder)
        return {"vocab_size": len(tokenizer)}

    def make_model(folder: Path) -> dict[str, Any]:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "tokenizer")
        return pretrain.build(tokenizer, texts("train"), texts("heldout"), folder, scale.recipe, **scale.model)

    def make_data(folder: Path) -> dict[str, Any]:
        return dataset.build(out / "corpus", folder, scale.train_records, scale.heldout_records)

    def train_lora(folder: Path) -> dict[str, Any]:
        factory.train(overrides, out / "logs" / "lora.log", show_from="before step 1")
        return {"heldout_loss": factory.eval_loss(folder)}

    def loss(name: str, adapter: list[str]) -> Callable[[Path], dict[str, Any]]:
        return lambda folder: factory.evaluate([*overrides, *adapter], folder, out / "logs" / f"{name}.log")

    def write_samples(_: Path) -> dict[str, Any]:
        records = dataset.read(out / "data", "heldout")
        chosen = [records[len(records) // 3], records[2 * len(records) // 3]]
        return {"samples": samples.complete(out / "model", out / "lora", chosen, scale.sample_tokens)}

    stages.run("corpus", "Text: the standard library's sources", lambda f: corpus.collect(f, scale.corpus_bytes))
    stages.run("tokenizer", "Byte-level tokenizer", make_tokenizer)
    stages.run("model", "Pretraining a small DeepSeek-V3 from scratch", make_model)
    stages.run("data", "Instruction data: functions and their docstrings", make_data)
    stages.run("before", "Held-out loss before LoRA", loss("before", []))
    stages.run("lora", "LoRA on int8 experts: llamafactory-cli train", train_lora)
    stages.run(
        "after", "Held-out loss after LoRA, in a new process", loss("after", [f"adapter_name_or_path={out / 'lora'}"])
    )
    stages.run("samples", "Samples", write_samples)
    return stages


def summarize(stages: Stages, scale: Scale) -> dict[str, Any]:
    """What the demo found, and in `failures` which of its criteria it missed."""
    figures = stages.figures
    before, trained, after = (figures[stage]["heldout_loss"] for stage in ("before", "lora", "after"))
    drop = (before - after) / before
    failures = []
    if not drop >= scale.required_drop:
        failures.append(
            f"held-out loss fell by {drop:.1%}, less than {scale.required_drop:.0%}: {before:.4f} to {after:.4f}"
        )
    if not abs(after - trained) <= RELOAD_TOLERANCE:
        failures.append(f"held-out loss is {after:.5f} with the reloaded adapter, {trained:.5f} at the end of training")
    return {
        "loss_curve": str(stages.out / "lora" / "training_loss.png"),
        "heldout_loss": {"before": before, "after_training": trained, "after_reload": after, "drop": drop},
        "samples": figures["samples"]["samples"],
        "seconds": {name: stage["seconds"] for name, stage in figures.items()},
        "stages": {name: {k: v for k, v in stage.items() if k != "samples"} for name, stage in figures.items()},
        "failures": failures,
    }


def show(summary: dict[str, Any]) -> None:
    """Prints a summary."""
    loss, seconds = summary["heldout_loss"], summary["seconds"]
    console.rule("[bold]Result", align="left")
    table = Table("stage", "seconds", box=None)
    for name, value in seconds.items():
        table.add_row(name, f"{value:.1f}")
    table.add_row("[bold]all", f"[bold]{sum(seconds.values()):.1f}")
    console.print(table)
    for sample in summary["samples"]:
        console.print(f"\n[dim]{sample['input']}[/]", markup=True, highlight=False)
        for name in ("reference", "before", "after"):
            console.print(f"[bold]{name:>9}[/] ", end="")
            console.print(sample[name] or "(nothing)", markup=False, highlight=False)
    console.print(f"\nloss curve      {summary['loss_curve']}", highlight=False)
    console.print(f"held-out loss   {loss['before']:.4f} before, {loss['after_reload']:.4f} after: {-loss['drop']:.1%}")
    console.print(
        f"reloaded        {loss['after_training']:.5f} in training, {loss['after_reload']:.5f} in a new process"
    )


def main(
    out: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = factory.YAML_OUT,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: shows that all stages run, not that it learns.")
    ] = False,
) -> None:
    """Make a small MoE, train it with LoRA on int8 experts through llamafactory-cli, and check the result."""
    out = out.resolve()
    scale = QUICK if quick else Scale()
    stages = run_stages(out, scale)
    summary = summarize(stages, scale)
    write_json(out / "summary.json", summary)
    show(summary)
    if summary["failures"]:
        sys.exit("\n".join(f"FAILED: {failure}" for failure in summary["failures"]))


if __name__ == "__main__":
    typer.run(main)
