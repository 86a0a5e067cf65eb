"""Training through transformers' own Trainer and through ktft's: reports, checks, checkpoints."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from adapted import load, lora_config, tensors_of
from given import Checkpoint, RunPython
from peft.tuners.tuners_utils import BaseTuner
from runs import DATA, adapted, arguments, losses
from stacks import shown_by_the_first_stack
from transformers import AutoModelForCausalLM

import ktft
from ktft.train.manifest import MANIFEST
from ktft.train.report import examine, format_report
from ktft.train.run_report import JSON_NAME
from ktft.train.trainer import check_launch

UNSAVED = {"save_strategy": "no"}


def test_plain_trainer_trains_and_reports(
    tiny_checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted(tiny_checkpoint("dsv3"), lora_dropout=0.1)
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=DATA)
    with caplog.at_level(logging.INFO, "ktft"):
        trainer.train()
    (report,) = [record.message for record in caplog.records if "before step 1" in record.message]
    for expected in ("2 layers x 8, bf16", "threads: 1", "attention", "shared experts", "routed experts", "router"):
        assert expected in report
    assert losses(trainer)[-1] < losses(trainer)[0]
    trainer.save_model()
    trained = [t for name, t in tensors_of(tmp_path).items() if ".mlp.experts." in name and "lora_B" in name]
    assert len(trained) == 2 * 8 * 3
    assert any(tensor.any() for tensor in trained)


def test_ktft_trainer_trains_int8_with_gradient_checkpointing(base: Path, tmp_path: Path) -> None:
    model = load(base, expert_format="int8", activation="recompute")
    model = ktft.get_peft_model(model, lora_config(target_modules=["experts"]))
    options = {"gradient_checkpointing": True, "bf16": True, "max_steps": 16, "learning_rate": 2e-2}
    trainer = ktft.Trainer(model, arguments(tmp_path, **UNSAVED | options), train_dataset=DATA)
    trainer.train()
    assert sum(losses(trainer)[-4:]) < 0.9 * sum(losses(trainer)[:4])


def test_accumulated_gradients_are_divided_once(base: Path, tmp_path: Path) -> None:
    """Whether accelerate is told the number of batches in a step, as by transformers before 5.5.4, or not."""
    norms = []
    for told in (1, 2):
        options = {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
        run = transformers.Trainer(adapted(base), arguments(tmp_path, **UNSAVED | options), train_dataset=DATA)
        run.accelerator.gradient_accumulation_steps = told
        run.train()
        norms.append(run.state.log_history[0]["grad_norm"])
    assert norms[0] == norms[1] > 0


def test_report_counts_what_trains(tiny_checkpoint: Checkpoint) -> None:
    model = adapted(tiny_checkpoint("dsv3"))
    report = examine(model)
    assert report is not None
    counts = {group.name: group.trainable for group in report.groups}
    # r = 4; hidden 64, experts 32 wide: 2 layers x 8 experts x 3 projections x r x (64 + 32)
    assert counts["routed experts"] == 2 * 8 * 3 * 4 * 96
    assert counts["shared experts"] == 2 * 3 * 4 * 96
    assert counts["router"] == 0
    assert sum(counts.values()) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert all(group.on_cpu == group.trainable for group in report.groups)
    assert report.packed_bytes >= 2 * 8 * 3 * 64 * 32 * 2
    assert f"{counts['routed experts']:,}" in format_report(report)
    assert examine(torch.nn.Linear(2, 2)) is None


def test_frozen_or_forgotten_lora_is_refused(base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    optimizer = torch.optim.SGD([p for n, p in model.named_parameters() if p.requires_grad and ".experts." not in n])

    def train(**options: Any) -> None:
        transformers.Trainer(model, arguments(tmp_path), train_dataset=DATA, **options).train()

    with pytest.raises(ValueError, match=r"optimizer lacks 18 trainable parameters.*\.experts\.lora_A"):
        train(optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)))
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.requires_grad = False
    with pytest.raises(ValueError, match="requested on routed experts, but none of it is trainable"):
        train()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match=r"no parameter is trainable"):
        train(optimizers=(optimizer, None))


def test_adapter_that_passes_the_experts_by_is_refused(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As PEFT makes it where nothing of ktft's is in its way."""
    plain = getattr(BaseTuner.inject_adapter, "__wrapped__", BaseTuner.inject_adapter)
    monkeypatch.setattr(BaseTuner, "inject_adapter", plain)

    def train(*targets: str) -> None:
        model = peft.get_peft_model(load(tiny_checkpoint("dsv3")), lora_config(target_modules=targets))
        transformers.Trainer(model, arguments(tmp_path, **UNSAVED, max_steps=1), train_dataset=DATA).train()

    words = "'default': its target_modules name projections of the routed experts, but no"
    with pytest.raises(ValueError, match=words):
        train("q_a_proj", "gate_proj")
    train("q_a_proj")


def test_precision_that_a_cpu_has_not_is_told(base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(tmp_path, **UNSAVED, fp16=True, max_steps=1)
    transformers.Trainer(adapted(base), args, train_dataset=DATA).train()
    assert "fp16: true has no effect on a CPU" in caplog.text
    report = json.loads((tmp_path / JSON_NAME).read_text())
    assert report["training"]["precision"] == "float32, as the model is; fp16 was asked for and has no effect on a CPU"


def test_several_gpus_are_refused(base: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args._n_gpu = 2  # what a machine with two GPUs gives: transformers would wrap the model in DataParallel
    model = adapted(base)
    for trainer in (transformers.Trainer, ktft.Trainer):
        with pytest.raises(ValueError, match="DataParallel over 2 GPUs.*CUDA_VISIBLE_DEVICES"):
            trainer(model, args, train_dataset=DATA)


@pytest.mark.parametrize(
    ("launch", "message"),
    [({"deepspeed": True}, "DeepSpeed"), ({"gpus": 2}, "DataParallel over 2 GPUs")],
)
def test_unsupported_launches(launch: dict[str, Any], message: str) -> None:
    check_launch()
    with pytest.raises(ValueError, match=f"ktft does not support .*{message}.*;"):
        check_launch(**launch)


def test_stock_models_are_left_alone(base: Path, tmp_path: Path) -> None:
    """They get no report and no manifest, and ktft's own Trainer refuses them."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    run = transformers.Trainer(model, arguments(tmp_path, max_steps=1, save_steps=1), train_dataset=DATA)
    run.train()
    run.save_model()
    assert not (tmp_path / JSON_NAME).exists() and not (tmp_path / "checkpoint-1" / MANIFEST).exists()
    with pytest.raises(ValueError, match="no experts held by ktft"):
        ktft.Trainer(model, arguments(tmp_path))


@shown_by_the_first_stack
def test_report_reaches_a_console_without_logging_set_up(fork_python: RunPython) -> None:
    code = "from ktft.train.report import logger; logger().info('seen'); logger().info('again')"
    done = fork_python(code)
    assert done.stderr.splitlines()[-2:] == ["[INFO|ktft] seen", "[INFO|ktft] again"], done.stderr
