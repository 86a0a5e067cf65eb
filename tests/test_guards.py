"""Runs in which something is silently not trained end with an error that names it; healthy runs do not."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from given import Checkpoint
from peft import LoraConfig
from runs import DATA, adapted, arguments, reduce_loss
from torch import Tensor
from transformers import TrainerCallback

from ktft.adapters.lora import KtftExpertsLora
from ktft.lora import ExpertLora, LoraPair
from ktft.model.experts import KtftExperts
from ktft.native import ExpertLayer
from ktft.train import gradients, guards
from ktft.train.gradients import trained_parameters
from ktft.train.guards import MAX_SKIPPED, WINDOW, GuardError, Guards, Step
from ktft.train.run import RunCallback
from ktft.train.run_report import JSON_NAME

MASKED = torch.full((16,), -100)


def trainer(
    model: Any,
    output: Path,
    data: list[dict[str, Tensor]] = DATA,
    optimizer: torch.optim.Optimizer | None = None,
    callbacks: list[TrainerCallback] | None = None,
    **overrides: Any,
) -> transformers.Trainer:
    args = arguments(output, **{"save_strategy": "no"} | overrides)
    return transformers.Trainer(model, args, train_dataset=data, optimizers=(optimizer, None), callbacks=callbacks)


def guards_of(run: transformers.Trainer) -> Guards:
    (callback,) = [each for each in run.callback_handler.callbacks if isinstance(each, RunCallback)]
    assert callback.run is not None
    return callback.run.guards


@pytest.fixture(scope="module")
def untouched(tiny_checkpoint: Checkpoint) -> Any:
    return adapted(tiny_checkpoint("dsv3"))


@pytest.fixture
def model(untouched: Any) -> Any:
    """LoRA on all of it."""
    return copy.deepcopy(untouched)


# --- caught -----------------------------------------------------------------------------------------------------------


def test_severed_expert_lora(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = KtftExpertsLora.active_lora

    def severed(self: KtftExpertsLora, top_k: int) -> ExpertLora:
        pairs = original(self, top_k).pairs.items()
        return ExpertLora({name: LoraPair(p.a.detach(), p.b.detach(), p.scaling) for name, p in pairs})

    monkeypatch.setattr(KtftExpertsLora, "active_lora", severed)
    with pytest.raises(GuardError, match="step 1: routed experts are not trained.*0 or absent.*experts.lora_A.*detach"):
        trainer(model, tmp_path).train()
    report = json.loads((tmp_path / JSON_NAME).read_text())
    assert report["ended"].startswith("GuardError: step 1: routed experts")
    assert report["guards"]["failure"] in report["ended"]
    assert report["guards"]["groups"]["attention"]["gradient_step"] == 1


def test_one_expert_of_one_projection(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = ExpertLayer.backward

    def backward(self: ExpertLayer, *args: Any) -> Any:
        grads = original(self, *args)
        grads.lora[3][7] = 0  # B of up_proj
        return grads

    monkeypatch.setattr(ExpertLayer, "backward", backward)
    message = r"layers\.[12]\.mlp\.experts\.lora_B\.default\.up_proj has no gradient for expert 7; the loss depends"
    with pytest.raises(GuardError, match=message):
        trainer(model, tmp_path).train()


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("layers.2.mlp.experts", r"layers\.2\.mlp\.experts: none of its tokens has a gradient, while other"),
        ("self_attn", r"step 1: attention are not trained.*self_attn.*lora_A"),
        # dense layers are in a group that may rest in a step, but not in all
        ("layers.0.mlp", r"other: no gradient in 4 steps.*layers\.0\.mlp"),
    ],
)
def test_modules_cut_off(model: Any, tmp_path: Path, ending: str, message: str) -> None:
    def cut(module: Any, args: Any, out: Any) -> Any:
        return (out[0].detach(), *out[1:]) if isinstance(out, tuple) else out.detach()

    for name, module in model.named_modules():
        if name.endswith(ending):
            module.register_forward_hook(cut)
    with pytest.raises(GuardError, match=message):
        trainer(model, tmp_path).train()


class Skipping(torch.optim.AdamW):
    """Leaves out the parameters whose names hold a word."""

    def __init__(self, model: Any, word: str, groups: bool = False) -> None:
        left = [p for n, p in model.named_parameters() if p.requires_grad and word in n]
        rest = [p for n, p in model.named_parameters() if p.requires_grad and word not in n]
        super().__init__([{"params": left, "lr": 0.0 if groups else 5e-3}, {"params": rest}], lr=5e-3)
        self.left = [] if groups else left

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for parameter in self.left:
            parameter.grad = None
        return super().step(closure)


@pytest.mark.parametrize(
    ("word", "groups", "message"),
    [
        (".experts.", False, r"step 1: routed experts.*gate_proj of experts .* is still 0 after.*rate is 0.005, so"),
        (
            ".shared_experts.",
            True,
            r"step 1: shared experts.*is still 0.*its parameter group is 0, that of others 0.005",
        ),
        ("lora_A", False, r"attention: .*lora_A.*the same bits as 4 optimizer steps ago; its learning rate is 0.005"),
    ],
)
def test_optimizer_that_leaves_some_out(model: Any, tmp_path: Path, word: str, groups: bool, message: str) -> None:
    with pytest.raises(GuardError, match=message):
        trainer(model, tmp_path, optimizer=Skipping(model, word, groups)).train()


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_gradients_that_are_not_finite(model: Any, tmp_path: Path, value: str) -> None:
    """Clipping makes all of them NaN; the first in backward's order is named all the same."""
    steps = iter(range(100))
    name = "base_model.model.model.layers.1.mlp.experts.lora_B.default.down_proj"

    def spoil(grad: Tensor) -> Tensor:
        if next(steps) == 12:  # beyond the window
            grad[5, 0, 0] = float(value)
        return grad

    model.get_parameter(name).register_hook(spoil)
    before = model.get_parameter(name).detach().clone()
    run = trainer(model, tmp_path, max_steps=20, save_strategy="steps", save_steps=12)
    message = rf"step 13: the gradient of {name} of expert 5 holds NaN or Inf. .* 1 of \d+ do. Nothing was updated"
    with pytest.raises(GuardError, match=message):
        run.train()
    assert (tmp_path / "checkpoint-12").is_dir()
    after = model.get_parameter(name)
    assert after.isfinite().all() and not torch.equal(after, before)


class Spoil(TrainerCallback):
    """Puts NaN into a parameter, as a broken optimizer would."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            name = "base_model.model.model.layers.2.self_attn.o_proj.lora_B.default.weight"
            kwargs["model"].get_parameter(name).data[0, 0] = float("nan")


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_parameters_that_are_not_finite_are_not_saved(model: Any, tmp_path: Path, strategy: str) -> None:
    run = trainer(model, tmp_path, callbacks=[Spoil()], max_steps=3, save_strategy=strategy, save_steps=1)
    with pytest.raises(GuardError, match=r"step 3: parameter .*layers\.2.*o_proj.lora_B.* holds NaN or Inf"):
        run.train()
    saved = {"checkpoint-1", "checkpoint-2"} if strategy == "steps" else set()
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == saved


# --- not caught -------------------------------------------------------------------------------------------------------


def masked(rows: int) -> list[dict[str, Tensor]]:
    """Samples whose prompts have no labels; the first rows have none at all."""
    answers = [torch.cat([MASKED[:12], each["labels"][12:]]) for each in DATA[rows:]]
    labels = [MASKED] * rows + answers
    return [{**each, "labels": own} for each, own in zip(DATA, labels, strict=True)]


HEALTHY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "warm-up from 0": ({}, {"warmup_steps": 3, "lr_scheduler_type": "linear"}),
    "accumulation": ({}, {"gradient_accumulation_steps": 3, "max_grad_norm": 0.0}),
    "checkpointing": ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}),
    "reentrant": ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
    "bf16, SGD": ({"lora_dropout": 0.3}, {"bf16": True, "optim": "sgd", "learning_rate": 1e-4}),
    "experts alone": ({"target_modules": ["experts"]}, {}),
    "no experts": ({"target_modules": ["o_proj"]}, {}),
    "one layer": ({"target_modules": ["experts", "o_proj"], "layers_to_transform": [2]}, {"logging_steps": 5}),
    "head": ({"modules_to_save": ["lm_head"]}, {"lr_scheduler_type": "cosine"}),
    "B is not zero": ({"init_lora_weights": False}, {"learning_rate": 1e-6}),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_healthy_runs(tiny_checkpoint: Checkpoint, tmp_path: Path, kind: str) -> None:
    lora, settings = HEALTHY[kind]
    run = trainer(adapted(tiny_checkpoint("dsv3"), **lora), tmp_path, max_steps=WINDOW + 3, **settings)
    run.train()
    seen = guards_of(run)
    assert seen.closed_step == WINDOW + ("warm-up" in kind)
    for group, proof in seen.proofs.items():
        assert proof.gradient_step == 1, group
        assert proof.update_step == 1 + ("warm-up" in kind)
        assert proof.late_update_step is not None
    assert "routed experts" in seen.proofs or kind == "no experts"


def test_tokens_without_labels(model: Any, tmp_path: Path) -> None:
    """In the last layer only tokens with a label have a gradient; a step may have none at all."""
    options = {"train_sampling_strategy": "sequential", "logging_nan_inf_filter": False}
    run = trainer(model, tmp_path, masked(rows=2), max_steps=WINDOW + 2, **options)
    reduce_loss(run, "sum")  # the mean over a batch without labels would be 0/0
    run.train()
    seen = guards_of(run)
    assert seen.proofs["attention"].gradient_step == 2
    assert seen.steps == WINDOW - 1  # steps 1, 5 and 9 had no gradient


def test_training_one_adapter_of_two(model: Any, tmp_path: Path) -> None:
    model.add_adapter("second", LoraConfig(r=2, target_modules=model.peft_config["default"].target_modules))
    model.set_adapter("second")
    run = trainer(model, tmp_path)
    run.train()
    assert all(".second" in name for name in guards_of(run).parameters)
    assert guards_of(run).closed_step == 4


def test_pure_bf16_that_rounds_all_away_is_told(
    tiny_checkpoint: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted(tiny_checkpoint("qwen3moe"), torch.bfloat16, target_modules=["o_proj"])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = torch.full_like(parameter, 0.01, dtype=torch.bfloat16)
    trainer(model, tmp_path, learning_rate=1e-9).train()
    assert "lost in rounding; set bf16: true in place of pure_bf16" in caplog.text


# --- gradient scaler, and cost ----------------------------------------------------------------------------------------


def scaled_steps(model: Any, count: int) -> Iterator[tuple[Guards, int]]:
    """Steps that a scaler may skip, with an Inf in each."""
    checks = Guards(trained_parameters(model))
    names = list(checks.parameters)
    rates = {id(each.parameter): 1e-3 for each in checks.parameters.values()}
    for number in range(1, count + 1):
        norms = {name: torch.tensor([1.0]) for name in names} | {names[0]: torch.tensor([float("inf")])}
        checks.before_step(Step(number, norms, {}, rates, scaled=True))
        yield checks, number


def test_overflow_in_fp16_is_no_alarm_before_it_never_ends(model: Any) -> None:
    for checks, number in scaled_steps(model, MAX_SKIPPED):
        checks.after_step(number, skipped=True)
    assert checks.open and checks.failure is None
    checks, number = list(scaled_steps(model, 1))[-1]
    with pytest.raises(GuardError, match="held NaN or Inf, and the step was not skipped"):
        checks.after_step(number, skipped=False)
    with pytest.raises(GuardError, match=f"{MAX_SKIPPED + 1} steps in a row were skipped.*set bf16: true"):
        for checks, number in scaled_steps(model, MAX_SKIPPED + 1):
            checks.after_step(number, skipped=True)


def test_checks_are_bounded(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the window no parameter is read, and gradients are at logged steps only."""
    sums, looks = [], []
    original, look = guards._bits, gradients.GradientWatch._look
    monkeypatch.setattr(guards, "_bits", lambda every, *rest: sums.extend(every) or original(every, *rest))

    def spy(self: gradients.GradientWatch, each: Any, parameter: Tensor) -> None:
        looks.append(self.on)
        look(self, each, parameter)

    monkeypatch.setattr(gradients.GradientWatch, "_look", spy)
    run = trainer(model, tmp_path, max_steps=WINDOW + 10, logging_steps=5)
    run.train()
    count = len(guards_of(run).parameters)
    assert len(sums) == count * (WINDOW + 1)
    assert sum(looks) == count * (WINDOW + 2)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert all(module.record is None for module in model.modules() if isinstance(module, KtftExperts))
