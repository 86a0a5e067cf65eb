"""The demo of `make demo`: a small MoE is made from nothing, learns with LoRA on int8 experts, and is checked.

Stages whose record exists under the output folder are not run again, so a demo that was stopped goes on where it was.
Stages import what they need when they run: torch must not be loaded before `main` has set its environment.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import dataset
import factory
import typer
from rich.console import Console
from rich.table import Table
from scale import QUICK, Scale

RELOAD_TOLERANCE = 1e-3  # of the loss in a new process against the loss at the end of training
console = Console()


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
        console.print("  ".join(f"{key} {value}" for key, value in figures.items() if isinstance(value, int | float)))
        self.figures[name] = figures
        return figures

    def forget(self, name: str) -> None:
        """Let the next run do this stage again, and all later ones."""
        (self.out / "records" / f"{name}.json").unlink(missing_ok=True)


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
        return [dataset.text_of(record) for record in dataset.read(out / "data", split)]

    def make_tokenizer(folder: Path) -> dict[str, Any]:
        from tokenizer import train_tokenizer

        tokenizer = train_tokenizer(texts("train"), scale.vocab_size)
        tokenizer.save_pretrained(folder)
        return {"vocab_size": len(tokenizer)}

    def make_model(folder: Path) -> dict[str, Any]:
        import pretrain
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "tokenizer")
        return pretrain.build(tokenizer, texts("train"), texts("heldout"), folder, scale.recipe, **scale.model)

    def train_lora(folder: Path) -> dict[str, Any]:
        factory.train(overrides, out / "logs" / "lora.log", show_from="[INFO|ktft] before step 1")
        return {"heldout_loss_before": factory.loss_at_start(folder), "heldout_loss": factory.eval_loss(folder)}

    def evaluate_again(folder: Path) -> dict[str, Any]:
        alone = [f"adapter_name_or_path={out / 'lora'}", "do_train=false", "plot_loss=false", f"output_dir={folder}"]
        factory.train([*overrides, *alone], out / "logs" / "reloaded.log")
        return {"heldout_loss": factory.eval_loss(folder)}

    def answer(_: Path) -> dict[str, Any]:
        import samples

        train, heldout = (dataset.read(out / "data", split) for split in ("train", "heldout"))
        return samples.compare(out / "model", out / "lora", train, heldout[: scale.prompts], scale.answer_tokens)

    data = "Text: functions of the standard library, and a sentence on each"
    stages.run("data", data, lambda folder: dataset.build(folder, scale.corpus_bytes, scale.heldout_records))
    stages.run("tokenizer", "Byte-level tokenizer", make_tokenizer)
    stages.run("model", "Pretraining a small DeepSeek-V3 from scratch", make_model)
    stages.run("lora", "LoRA on int8 experts: llamafactory-cli train", train_lora)
    stages.run("reloaded", "Held-out loss with the saved adapter, in a new process", evaluate_again)
    stages.run("answers", "Answers to held-out prompts, without and with LoRA", answer)
    return stages


def summarize(stages: Stages, scale: Scale) -> dict[str, Any]:
    """What the demo found, and in `failures` which of its criteria it missed."""
    figures = stages.figures
    answers, lora = figures["answers"], figures["lora"]
    before, trained, after = lora["heldout_loss_before"], lora["heldout_loss"], figures["reloaded"]["heldout_loss"]
    right = {name: answers[f"right_{name}"] / answers["prompts"] for name in ("before", "after")}
    failures = []
    if not right["after"] - right["before"] >= scale.required_gain:
        steps = f"{figures['model']['steps']} of {scale.recipe.steps}"
        failures.append(
            f"{right['before']:.0%} of the answers were right before LoRA and {right['after']:.0%} after, a gain of "
            f"less than {scale.required_gain:.0%}; pretraining had time for {steps} steps: on a busy machine "
            "run the demo again, on a slow one raise max_seconds in examples/demo/scale.py"
        )
    if not abs(after - trained) <= RELOAD_TOLERANCE:
        failures.append(f"held-out loss is {after:.5f} with the reloaded adapter, {trained:.5f} at the end of training")
    return {
        "loss_curve": str(stages.out / "lora" / "training_loss.png"),
        "report": str(stages.out / "lora" / "ktft_report.html"),
        "heldout_loss": {"before": before, "after_training": trained, "after_reload": after},
        "right_answers": {name: answers[name] for name in ("prompts", "right_before", "right_after", "commonest")},
        "samples": [answers["answers"][len(answers["answers"]) * third // 3] for third in range(3)],
        "seconds": {name: stage["seconds"] for name, stage in figures.items()},
        "stages": {name: {k: v for k, v in stage.items() if k != "answers"} for name, stage in figures.items()},
        "failures": failures,
    }


def show(summary: dict[str, Any], out: Path) -> None:
    """Prints a summary, and what a reader can do next."""
    loss, seconds, right = summary["heldout_loss"], summary["seconds"], summary["right_answers"]
    console.rule("[bold]Result", align="left")
    table = Table("stage", "seconds", box=None)
    for name, value in seconds.items():
        table.add_row(name, f"{value:.1f}")
    table.add_row("[bold]all", f"[bold]{sum(seconds.values()):.1f}")
    console.print(table)
    console.print("\nThree of the held-out functions, and how the model describes them:")
    for sample in summary["samples"]:
        console.print(f"\n{sample['input']}", style="dim", markup=False, highlight=False)
        for name, label in (("before", "before LoRA"), ("after", "after LoRA"), ("reference", "right")):
            console.print(f"[bold]{label:>11}[/]  ", end="")
            console.print(" ".join(sample[name].split()) or "(nothing)", markup=False, highlight=False)
    lines = {
        "right answers": f"{right['right_before']} of {right['prompts']} before LoRA, {right['right_after']} after "
        f"(the commonest sentence every time: {right['commonest']})",
        "held-out loss": f"{loss['before']:.4f} before LoRA, {loss['after_training']:.4f} after",
        "reloaded": f"{loss['after_reload']:.4f}, with the saved adapter in a new process",
        "loss curve": summary["loss_curve"],
        "report": summary["report"],
    }
    console.print()
    for name, text in lines.items():
        console.print(f"{name:<15}{text}", markup=False, highlight=False, soft_wrap=True)
    console.print("\n[bold]Next")
    yaml, model, adapter = "examples/yaml/kt_deepseek_lora.yaml", out / "model", out / "lora"
    commands = {
        ".venv/bin/ktft doctor": "Is this machine ready for a large model?",
        f".venv/bin/ktft plan MODEL {yaml}": "Does MODEL, a folder or a Hugging Face name, fit, and how fast is it?",
        f".venv/bin/ktft train {yaml}": "Train it, after a change of the lines (1) and (2) of that file.",
        f".venv-serve/bin/ktft serve {model} --adapter {adapter}": "Serve the demo's model, after `make serving`.",
    }
    for command, purpose in commands.items():
        console.print(f"  {command}\n      {purpose}", markup=False, highlight=False, soft_wrap=True)


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
    show(summary, out)
    if summary["failures"]:
        stages.forget("model")
        sys.exit("\n".join(f"FAILED: {failure}" for failure in summary["failures"]))


if __name__ == "__main__":
    typer.run(main)
