"""Runs that no longer learn end with an error that names the cause, in every Trainer; healthy runs go on."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from adapted import load, lora_config
from datasets import Dataset
from forked import Forks
from given import Checkpoint, RunCli, TrainYaml
from runs import DATA, adapted, arguments, reduce_loss
from tiny import tokenizer

from ktft.train.dead import DEAD_STEPS, LOST_STEPS, WITHOUT_GRADIENT, LifeSigns, Look
from ktft.train.guards import GuardError
from ktft.train.run_report import JSON_NAME, PAGE_NAME

ADAPTER = "adapter_model.safetensors"
TOO_LARGE = 10000
"""A learning rate whose minus sign was lost."""
DEAD = r"step (\d+): the run is dead: the gradient of every trained tensor is exactly 0 .*learning_rate, which is 10000"


def trainer(path: Path, output: Path, data: Any = DATA, **overrides: Any) -> transformers.Trainer:
    settings = {"max_steps": 20, "learning_rate": TOO_LARGE, "logging_steps": 10, "save_steps": 1} | overrides
    return transformers.Trainer(adapted(path), arguments(output, **settings), train_dataset=data)


def check_dead(output: Path, message: str) -> None:
    """The run ended within 20 steps, its report says why, and it saved no final adapter."""
    report = json.loads((output / JSON_NAME).read_text())
    assert report["ended"].startswith("GuardError: ") and report["guards"]["failure"] in report["ended"]
    assert report["guards"]["failure"] in " ".join(message.split())
    assert report["steps"]["step"][-1] < 20
    assert f"<p class=failed>Ended by {report['ended'][:30]}" in (output / PAGE_NAME).read_text()
    assert not (output / ADAPTER).exists()


# --- Trainers ---------------------------------------------------------------------------------------------------------


def test_plain_trainer_ends_and_keeps_what_was_good(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=DEAD) as raised:
        trainer(tiny_checkpoint("dsv3"), tmp_path, save_total_limit=1).train()
    check_dead(tmp_path, str(raised.value))
    dead = int(str(raised.value).split("steps ")[1].split()[0])  # the first such step
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{dead - 1}"]


def test_run_that_is_too_short_for_certainty_does_not_finish(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=DEAD):
        trainer(tiny_checkpoint("qwen3moe"), tmp_path, max_steps=4, save_strategy="no").train()


@pytest.mark.parametrize("stage", ["sft", "dpo"])
def test_factory_ends(train_yaml: TrainYaml, fork_cli: RunCli, tmp_path: Path, stage: str) -> None:
    options = {"learning_rate": TOO_LARGE, "max_steps": 20, "lora_dropout": 0.1}
    done = fork_cli(["llamafactory-cli", "train"], train_yaml("dsv3", stage, **options), check=False)
    assert done.returncode != 0, done.stdout
    check_dead(tmp_path / "out", done.stdout)
    assert "learning_rate, which is 10000" in done.stdout
    facts = json.loads((tmp_path / "out" / JSON_NAME).read_text())
    told = {"stage": stage, "dataset": stage, "template": "default", "cutoff_len": 64, "samples": 16}
    assert facts["data"].items() >= told.items()
    assert facts["training"]["gradient_checkpointing"] is True  # LLaMA-Factory's, not the Trainer's argument
    assert facts["adapter"]["lora"]["default"]["lora_dropout"] == 0.1


def test_trainer_of_trl_reports_and_ends(
    tiny_checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from trl import SFTConfig, SFTTrainer

    texts = Dataset.from_list([{"text": f"add {i} and {i + 1}: {2 * i + 1}"} for i in range(16)])
    options = {"max_steps": 20, "learning_rate": TOO_LARGE, "save_strategy": "no"}
    args = arguments(tmp_path, cls=SFTConfig, bf16=False, **options)
    model, words = load(tiny_checkpoint("qwen3moe")), tokenizer()
    run = SFTTrainer(model, args, train_dataset=texts, processing_class=words, peft_config=lora_config())
    with caplog.at_level(logging.INFO, "ktft"), pytest.raises(GuardError, match=DEAD) as raised:
        run.train()
    check_dead(tmp_path, str(raised.value))
    (report,) = [record.message for record in caplog.records if "before step 1" in record.message]
    assert f"  {'routed experts':<15}{3 * 8 * 3 * 4 * 96:>16,}" in report


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_run_whose_labels_are_all_masked_does_not_finish(
    tiny_checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture, reduction: str
) -> None:
    """The loss is 0 or NaN, and transformers does not log NaN."""
    data = [{**each, "labels": torch.full((16,), -100)} for each in DATA]
    run = trainer(tiny_checkpoint("qwen3moe"), tmp_path, data, max_steps=WITHOUT_GRADIENT + 1, learning_rate=1e-3)
    reduce_loss(run, reduction)
    message = f"in any of {WITHOUT_GRADIENT + 1} steps.*do all labels say -100.*cutoff_len"
    with pytest.raises(GuardError, match=message):
        run.train()
    assert len([each for each in caplog.records if "do all labels say -100" in each.message]) == 1  # told early


# --- signs ------------------------------------------------------------------------------------------------------------


def looks(*losses: float | None, norms: list[float] | None = None, rate: float = 1e-4) -> tuple[str | None, LifeSigns]:
    """The reason that ends a run with these losses and gradient norms, at the latest at its end, and the signs then."""
    signs = LifeSigns(320)
    for number, loss in enumerate(losses, 1):
        reason = signs.look(Look(number, loss, norms[number - 1] if norms else 1.0, rate))
        if reason is not None:
            return reason, signs
    return signs.end(), signs


GUESS, LN2 = math.log(320), math.log(2)
HEALTHY: dict[str, dict[str, Any]] = {
    "pretraining from a random model": {"losses": [GUESS] * 300},
    "learned by heart": {"losses": [2.0, 1.0, *[1e-9] * 300], "norms": [1.0, 1.0, *[0.0] * 300]},
    "DPO at ln 2, then saturated": {"losses": [LN2, *[0.0] * 300], "norms": [1.0, *[0.0] * 300]},
    "pairs that are cut off alike": {"losses": [LN2] * 300, "norms": [1.0, *[0.0] * 9] * 30},
    "batches without labels": {"losses": [0.0, math.nan, 5.0] * 100, "norms": [0.0, 0.0, 1.0] * 100},
    "a loss that nobody told": {"losses": [None] * 300, "norms": [1.0, *[0.0] * 299]},
    "a peak after a restart": {"losses": [2.0, 2.0, 2.0, *[GUESS + 1] * (LOST_STEPS - 1), 3.0, 2.0], "rate": 0.1},
    "hard samples in the end": {"losses": [2.0, 2.0, 2.0, *[GUESS + 1] * 30]},
    "a loss that is a sum": {"losses": [60.0, *[300.0] * 300], "rate": 0.1},
    "a loss below 0": {"losses": [-1.0] * 300},
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_signs(kind: str) -> None:
    each = dict(HEALTHY[kind])
    assert looks(*each.pop("losses"), **each)[0] is None


@pytest.mark.parametrize(
    ("losses", "norms", "rate", "steps", "message"),
    [
        ([2.0] + [GUESS] * 9, [1.0] + [0.0] * 9, 3.0, 1 + DEAD_STEPS, "guess among its 320 tokens.*which is 3; LoRA"),
        ([0.7] + [LN2] * 9, [1.0] + [0.0] * 9, 3.0, 1 + DEAD_STEPS, r"0.6931, ln\(2\), that of a model which pr"),
        ([2.0] * 99, [1.0] + [0.0] * 99, 1e-4, 1 + 10 * DEAD_STEPS, "learning_rate is 0.0001, which is not unusual"),
        ([2.0] * 99, [0.0] * 99, 1e-4, 10 * DEAD_STEPS, "There never was a gradient.*cuts the graph"),
        ([2.0] * 20, [1.0] + [0.0] * 19, 1e-4, 20, "step 20: the run is dead.*in steps 2 to 20"),
        ([2.0, 0.0, 2.0, 2.0], [1.0] + [0.0] * 3, 3.0, 4, "step 4: the run is dead.*in steps 3 to 4"),
        ([2.0] + [9.0] * 50, [1.0] * 51, 3.0, 11, "was 2 at first and is 9 now.*In steps 2 to 11.*which is 3"),
        ([2.0] * 3 + [9.0] * 150, [1.0] * 153, 1e-4, 3 + 10 * LOST_STEPS, "lost what it knew.*not unusual"),
        ([2.0] + [9.0] * 5, [1.0] * 6, 3.0, 6, "step 6: the model has lost what it knew"),
    ],
)
def test_signs_of_death(losses: list[float], norms: list[float], rate: float, steps: int, message: str) -> None:
    reason, signs = looks(*losses, norms=norms, rate=rate)
    assert reason is not None and re.search(message, reason), reason
    assert signs.looks == steps and signs.doubtful


def test_a_run_stopped_by_hand_says_how_to_continue(train_yaml: TrainYaml, forks: Forks, tmp_path: Path) -> None:
    """Ctrl-C prints one line, without a traceback."""
    config, output, log = tmp_path / "train.yaml", tmp_path / "out", tmp_path / "log"
    config.write_text(yaml.safe_dump(train_yaml(max_steps=10000, save_steps=1, save_total_limit=1)))
    command = [str(Path(sys.executable).parent / "llamafactory-cli"), "train", str(config)]
    run = forks.start(command, dict(os.environ), log)
    try:
        while run.poll() is None and not list(output.glob("checkpoint-*")):
            time.sleep(0.1)
        os.kill(run.pid, signal.SIGINT)
        code = run.wait()
    finally:
        run.kill()
    words = log.read_text()
    assert code == 130 and "Traceback" not in words, words
    assert re.search(rf"interrupted after step \d+; the same command goes on from {output}/checkpoint-\d+", words)


def test_tokens_of_a_pair_that_cancel_out_are_no_alarm(train_yaml: TrainYaml, fork_cli: RunCli, tmp_path: Path) -> None:
    """Where both answers of a pair agree, their gradients are exactly opposite, so an expert may get a sum of 0."""
    fork_cli(["llamafactory-cli", "train"], train_yaml("dsv3", "dpo", max_steps=3, lora_dropout=0.1))
    assert json.loads((tmp_path / "out" / JSON_NAME).read_text())["ended"] == "finished"
