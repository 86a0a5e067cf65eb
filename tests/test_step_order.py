"""The order in which all micro-batches of a step go through a layer together, against the usual order."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import runs
import torch
from adapted import distance, load, lora_config, randomize
from given import Checkpoint
from stacks import shown_by_the_first_stack
from tiny import FAMILIES, MORE_FAMILIES
from tiny_newer import SEE_IMAGES
from torch import Tensor, nn
from transformers import Trainer

import ktft
from ktft.config import LANE_BYTES
from ktft.dense.linear import PackedLinear
from ktft.model import lockstep
from ktft.model.experts import find_experts
from ktft.train.step_order import StepOrder, _coming, _token_bytes

STEP = 4
"""Micro-batches in a step."""


def count_passes(model: nn.Module) -> dict[str, int]:
    """How often a layer of routed experts runs forward and backward on the CPU, from now on."""
    layer = next(iter(find_experts(model).values())).layer
    counted = {"forward": 0, "backward": 0}

    def counting(name: str) -> Any:
        original = getattr(layer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return original(*args, **kwargs)

        return call

    for name in counted:
        setattr(layer, name, counting(name))
    return counted


def one_step(
    path: Path, out: Path, together: int | str, **settings: Any
) -> tuple[dict[str, Tensor], float, dict[str, int]]:
    """Gradients and loss of a step of micro-batches of different lengths, and how often a layer's experts ran."""
    lora, aux_loss = {"lora_dropout": settings.pop("lora_dropout", 0.0)}, settings.pop("aux_loss", 0.0)
    model = randomize(runs.adapted(path, settings={"micro_batches_together": together}, **lora), std=0.05)
    model.config.output_router_logits, model.get_base_model().router_aux_loss_coef = aux_loss > 0, aux_loss
    counted, grads = count_passes(model), {}
    torch.manual_seed(1)
    rows = [torch.randint(3, 100, (length,)).tolist() for length in (9, 17, 13, 5)]
    data = [{"input_ids": ids, "labels": ids} for ids in rows]

    class Keeping(Trainer):
        def _clip_grad_norm(self, model: nn.Module) -> Any:
            grads.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
            return super()._clip_grad_norm(model)

    own = {"max_steps": 1, "per_device_train_batch_size": 1, "gradient_accumulation_steps": STEP, "save_strategy": "no"}
    trainer = Keeping(model, runs.arguments(out, **own | settings), train_dataset=data)
    trainer.train()
    return grads, runs.losses(trainer)[0], counted


def assert_same(usual: dict[str, Tensor], together: dict[str, Tensor], most: float) -> None:
    """`most` is the largest difference, relative to the norm of the gradient."""
    assert usual.keys() == together.keys()
    differences = {name: distance(together[name], grad) for name, grad in usual.items() if grad.any()}
    assert max(differences.values()) < most, max(differences, key=lambda name: differences[name])


# By default those whose layers differ most; what checkpointing changes does not depend on the family
BY_DEFAULT = {
    *(("dsv3", True), ("gpt_oss", True), ("qwen3_5", True)),
    *(("glm5", False), ("mixtral", False), ("qwen3moe", False)),
    *(("llama4", True), ("longcat", True)),
}
CASES = [
    pytest.param(family, on, marks=() if (family, on) in BY_DEFAULT else pytest.mark.full)
    for family in sorted({*FAMILIES, *MORE_FAMILIES} - SEE_IMAGES)
    for on in (False, True)
]


@pytest.mark.parametrize(("family", "checkpointing"), CASES)
def test_same_gradients(tiny_checkpoint: Checkpoint, tmp_path: Path, family: str, checkpointing: bool) -> None:
    path, settings = tiny_checkpoint(family), {"gradient_checkpointing": checkpointing}
    usual, loss, _ = one_step(path, tmp_path / "usual", 1, **settings)
    together, same, counted = one_step(path, tmp_path / "together", "auto", **settings)
    assert same == pytest.approx(loss, rel=1e-5)
    # Models with images are in bf16, which rounds the sum of a tensor's gradients in the order in which they come
    assert_same(usual, together, 0.05 if family == "qwen3_5" else 1e-3)
    assert counted == {"forward": 1 + checkpointing, "backward": 1}


@shown_by_the_first_stack
def test_dropout_is_the_same_when_a_layer_is_run_again(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Without checkpointing nothing is run again, so equal gradients prove that every mask was drawn again."""
    path = tiny_checkpoint("dsv3")
    once, loss, _ = one_step(path, tmp_path / "once", "auto", gradient_checkpointing=False, lora_dropout=0.3)
    again, same, _ = one_step(path, tmp_path / "again", "auto", gradient_checkpointing=True, lora_dropout=0.3)
    none, other, _ = one_step(path, tmp_path / "none", "auto", gradient_checkpointing=True)
    assert same == loss != other
    assert_same(once, again, 1e-5)
    assert distance(once[max(once)], none[max(once)]) > 0.01


@shown_by_the_first_stack
@pytest.mark.parametrize("together", ["auto", 2, 3])
def test_dropout_is_the_same_in_every_order(tiny_checkpoint: Checkpoint, tmp_path: Path, together: int | str) -> None:
    """On attention and on experts."""
    path, settings = tiny_checkpoint("dsv3"), {"gradient_checkpointing": True, "lora_dropout": 0.3}
    usual, loss, _ = one_step(path, tmp_path / "usual", 1, **settings)
    grads, same, _ = one_step(path, tmp_path / "together", together, **settings)
    assert same == pytest.approx(loss, rel=1e-5)
    assert_same(usual, grads, 1e-3)


def test_the_loss_that_balances_experts_has_gradients(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Router logits leave each layer beside its output. Reentrant checkpointing alone would lose their gradients."""
    path, ways = tiny_checkpoint("qwen3moe"), [{"use_reentrant": False}, {"use_reentrant": True}]
    settings = [{"gradient_checkpointing": True, "gradient_checkpointing_kwargs": way} for way in ways]
    without, _, _ = one_step(path, tmp_path / "without", 1, **settings[0])
    usual, loss, _ = one_step(path, tmp_path / "usual", 1, aux_loss=20.0, **settings[0])
    for at, way in enumerate([*settings, {"gradient_checkpointing": False}]):
        grads, same, _ = one_step(path, tmp_path / f"together-{at}", "auto", aux_loss=20.0, **way)
        assert same == pytest.approx(loss, rel=1e-5)
        assert_same(usual, grads, 1e-3)
    first = next(name for name in usual if "layers.0.self_attn" in name)
    assert distance(without[first], usual[first]) > 0.01


@pytest.mark.parametrize("together", [2, 3])
def test_groups_of_a_step(tiny_checkpoint: Checkpoint, tmp_path: Path, together: int) -> None:
    path = tiny_checkpoint("qwen3moe")
    usual, loss, alone = one_step(path, tmp_path / "usual", 1)
    grads, same, counted = one_step(path, tmp_path / "together", together)
    assert same == pytest.approx(loss, rel=1e-5)
    assert_same(usual, grads, 1e-4)
    assert alone == {"forward": STEP, "backward": STEP}
    assert counted == {"forward": 2, "backward": 2}


@shown_by_the_first_stack
def test_a_resumed_run_keeps_its_groups(
    tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much memory is free: sums in another order would have other last bits."""
    path = tiny_checkpoint("qwen3moe")

    def run(out: Path, room: int, resume: Path | None = None, **settings: Any) -> tuple[Trainer, dict[str, int]]:
        monkeypatch.setattr(StepOrder, "_room", lambda *_: room)
        found = runs.trainer(path, out, gradient_accumulation_steps=4, lr_scheduler_type="constant", **settings)
        counted = count_passes(found.model)
        found.train(resume_from_checkpoint=None if resume is None else str(resume))
        return found, counted

    whole, counted = run(tmp_path / "whole", 40)
    assert counted["backward"] == 7 * 2  # 4 micro-batches of 16 tokens in each step
    run(tmp_path / "stopped", 40, max_steps=3)
    resumed, counted = run(tmp_path / "stopped", 1000, tmp_path / "stopped" / "checkpoint-3")
    assert counted["backward"] == 4 * 2
    runs.require_same_end(resumed, whole)


def test_a_run_goes_the_usual_way_where_it_must_and_says_why(
    tiny_checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(Trainer):
        def _prepare_inputs(self, inputs: Any) -> Any:
            return super()._prepare_inputs(inputs)

    run = runs.trainer(tiny_checkpoint("qwen3moe"), tmp_path, cls=Own, max_steps=1)
    counted = count_passes(run.model)
    run.train()
    assert counted == {"forward": 2, "backward": 2}
    assert "goes through the model by itself: Own prepares its inputs by code of its own" in caplog.text


def test_a_failure_ends_all_micro_batches(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The error is that of the micro-batch; no thread of the others stays behind."""

    class Failing(Trainer):
        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(model, inputs, *args, **kwargs)
            if bool((inputs["input_ids"] == 40).any()):
                raise ArithmeticError("a loss that cannot be")
            return found

    run = runs.trainer(tiny_checkpoint("qwen3moe"), tmp_path, cls=Failing, gradient_accumulation_steps=4)
    with pytest.raises(ArithmeticError, match="a loss that cannot be"):
        run.train()
    assert not any(thread.name.startswith("ktft-lockstep") and is_busy(thread) for thread in threading.enumerate())
    assert json.loads((tmp_path / "ktft_report.json").read_text())["ended"].startswith("ArithmeticError")


def is_busy(thread: threading.Thread) -> bool:
    """Whether a thread of a pool is in a function that the pool was given."""
    frame = sys._current_frames()[thread.ident or 0]
    while frame is not None:
        if frame.f_code.co_filename == lockstep.__file__:
            return True
        frame = frame.f_back
    return False


def test_room_is_left_for_what_the_first_step_takes(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients, moments, and memory for two layers of weights that are streamed; attention's scores where they are."""
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    model = ktft.get_peft_model(load(tiny_checkpoint("qwen3moe"), dense_placement="host"), lora_config())
    run = SimpleNamespace(model=model, optimizer=SimpleNamespace(state={}))
    (stream,) = {each.stream for each in model.modules() if isinstance(each, PackedLinear)}
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert stream.slot_bytes > 0 and _coming(run) == LANE_BYTES + stream.slot_bytes + 12 * trained
    step = [{"input_ids": torch.ones(1, 7, dtype=torch.long)}, {"input_ids": torch.ones(1, 9, dtype=torch.long)}]
    fused = _token_bytes(model, step)
    model.config._attn_implementation = "eager"
    heads = model.config.num_attention_heads
    assert _token_bytes(model, step).waiting - fused.waiting == heads * 9 * 4 * model.config.num_hidden_layers
    model(input_ids=torch.ones(1, 70, dtype=torch.long))
    run.optimizer.state = {"a parameter": 0}
    assert _coming(run) == 0
