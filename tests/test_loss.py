"""The loss in chunks of tokens, against the usual one, whose logits are there for all tokens at once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import runs
import torch
import torch.nn.functional as F
import transformers
from adapted import distance, randomize
from chunks import CHUNK, IGNORED, WORDS, Largest
from given import Checkpoint, RunExp, TrainYaml
from torch import Tensor, nn

from ktft.model import lazy_logits
from ktft.model.lazy_logits import LazyLogits, LazyOutput, chunk_tokens, loss_bytes
from ktft.train.loss import LossInChunks, loss_room

SMALL: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
OF_TRANSFORMERS = {
    "soft cap": transformers.Gemma2Config(**SMALL, final_logit_softcapping=2.0),
    "scaled": transformers.GraniteMoeConfig(**SMALL, num_local_experts=4, logits_scaling=3.0),
    "multiplied": transformers.CohereConfig(**SMALL, logit_scale=0.7),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy_logits, "CHUNK_BYTES", 0)
    monkeypatch.setattr(lazy_logits, "_FEWEST_TOKENS", CHUNK)


def adapted(name: str, checkpoint: Checkpoint) -> nn.Module:
    """A model of transformers, or one with ktft's experts, with LoRA."""
    if name not in OF_TRANSFORMERS:
        return randomize(runs.adapted(checkpoint(name)))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(OF_TRANSFORMERS[name])
    return randomize(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"])))


def batch() -> dict[str, Tensor]:
    """Two rows: a prompt without labels, an answer, and padding in the second."""
    torch.manual_seed(2)
    ids = torch.randint(3, 300, (2, 24))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :7], labels[1, 19:], mask[1, 19:] = IGNORED, IGNORED, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(model: nn.Module, **given: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    """The loss of a batch, the gradients of the adapters, and all that the model returns."""
    model.zero_grad()
    out = model(**batch() | given)
    out.loss.backward()
    return out.loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, out


def head_of(model: Any) -> Any:
    return next(each for each in model.modules() if isinstance(each, transformers.PreTrainedModel)).lm_head


@pytest.fixture
def arguments(tmp_path: Path) -> transformers.TrainingArguments:
    return runs.arguments(tmp_path)


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("name", ["qwen3moe", "dsv3", *OF_TRANSFORMERS])
def test_same_loss_and_gradients(
    tiny_checkpoint: Checkpoint, arguments: transformers.TrainingArguments, name: str, autocast: bool
) -> None:
    """The largest thing with a row for each token is a chunk of logits."""
    model = adapted(name, tiny_checkpoint)
    for given in ({}, {"num_items_in_batch": torch.tensor(99)}):
        with torch.autocast("cpu", torch.bfloat16, autocast):
            with Largest() as usual:
                loss, grads, _ = step(model, **given)
            chunks = LossInChunks(model, arguments)
            with Largest() as largest:
                same, others, out = step(model, **given)
            chunks.close()
        assert usual.rows == 48 and largest.rows == CHUNK
        assert isinstance(out.logits, LazyLogits) and not out.logits.computed
        torch.testing.assert_close(same, loss, rtol=1e-5, atol=0)
        assert grads.keys() == others.keys()
        # Kernels of experts round gradients to bf16: what falls to the other side is 2^-8 off
        most = 0.05 if autocast else 2**-8
        for key, grad in grads.items():
            assert grad.any() and distance(others[key], grad) < most, key
        logits = out.logits[0, 3].tolist()  # a real tensor after the step too
        assert logits == pytest.approx(head_logits(model, autocast)[0, 3].tolist(), abs=1e-5)


def head_logits(model: nn.Module, autocast: bool) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, autocast):
        return model(**batch()).logits  # type: ignore[no-any-return]


# --- where it applies -------------------------------------------------------------------------------------------------


def as_adapted(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "lm_head"]))


def as_adapted_and_frozen(model: Any) -> Any:
    return as_adapted(model).requires_grad_(False)


def as_saved_whole(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))


def as_trained(model: Any) -> Any:
    head_of(model).weight.requires_grad_()
    return model


OBSTACLES: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "adapted": (as_adapted, {}, "the output layer is trained"),
    "adapted and frozen": (as_adapted_and_frozen, {}, "the output layer is trained"),
    "saved whole": (as_saved_whole, {}, "the output layer is trained"),
    "trained": (as_trained, {}, "the output layer is trained"),
    "compiled": (lambda model: model, {"torch_compile": True}, "torch_compile is on"),
    "liger": (lambda model: model, {"use_liger_kernel": True}, "Liger's kernels compute it"),
    "no head": (lambda model: model.model, {}, "the model names no output layer"),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_the_log_says_why_not(tmp_path: Path, caplog: pytest.LogCaptureFixture, obstacle: str) -> None:
    prepare, settings, why = OBSTACLES[obstacle]
    frozen = transformers.AutoModelForCausalLM.from_config(OF_TRANSFORMERS["multiplied"]).requires_grad_(False)
    model, args = prepare(frozen), runs.arguments(tmp_path)
    for name, value in settings.items():
        setattr(args, name, value)
    with caplog.at_level(logging.INFO, "ktft"):
        chunks = LossInChunks(model, args, told=True)
    assert f"the loss holds the logits of all tokens of a micro-batch: {why}" in caplog.text
    assert not any(isinstance(vars(each).get("forward"), LazyOutput) for each in model.modules())
    chunks.close()


def test_ligers_loss_is_left_alone(arguments: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """As LLaMA-Factory puts it there: functions of transformers and torch are others."""
    model = transformers.AutoModelForCausalLM.from_config(OF_TRANSFORMERS["multiplied"]).requires_grad_(False)
    fused = SimpleNamespace(__module__="liger_kernel.transformers.functional")
    for owner, name in ((F, "cross_entropy"), (type(model), "forward")):
        with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "ktft"):
            patch.setattr(owner, name, fused)
            LossInChunks(model, arguments, told=True)
        assert "Liger's kernels compute it" in caplog.text
        assert "forward" not in vars(head_of(model))
        caplog.clear()


def test_a_head_that_is_trained_later_has_real_logits(arguments: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_config(OF_TRANSFORMERS["multiplied"]).requires_grad_(False)
    grads = []
    for chunks in (False, True):
        if chunks:
            LossInChunks(model, arguments)
        weight = head_of(model).weight.requires_grad_()
        model(**batch()).loss.backward()
        grads.append(weight.grad.clone())
        model.zero_grad()
        model.requires_grad_(False)
    torch.testing.assert_close(grads[1], grads[0])


def test_close_gives_the_layer_back(arguments: Any) -> None:
    model = transformers.AutoModelForCausalLM.from_config(OF_TRANSFORMERS["multiplied"]).requires_grad_(False)
    head = head_of(model)
    for own in (None, lambda x: F.linear(x, head.weight)):
        if own is not None:
            head.forward = own
        first, second = LossInChunks(model, arguments), LossInChunks(model, arguments)
        second.close()  # of an evaluation within training
        assert isinstance(head.forward, LazyOutput)
        first.close()
        first.close()
        assert vars(head).get("forward") is own


def test_room_for_the_loss(base: Path, tmp_path: Path) -> None:
    run = runs.trainer(base, tmp_path)
    assert loss_room(run, 1000) == 1000 * WORDS * 16
    chunks = LossInChunks(run.model, run.args)
    assert loss_room(run, 1000) == loss_bytes(1000, WORDS, 64, 4) == CHUNK * WORDS * 12 + 2 * 1000 * 64 * 4
    runs.reduce_loss(run, "mean")
    assert loss_room(run, 1000) == 1000 * WORDS * 16
    chunks.close()


def test_a_chunk_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert chunk_tokens(129_280) == 259
    assert chunk_tokens(10**7) == 32
    assert loss_bytes(65_536, 129_280, 7168, 2) < 2.3e9


# --- in training ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        ("sft", {"neat_packing": True, "cutoff_len": 128, "gradient_accumulation_steps": 2}),
        (
            "sft",
            {"bf16": True, "eval_dataset": "sft", "eval_strategy": "steps", "eval_steps": 1, "compute_accuracy": True},
        ),
        ("sft", {"use_dft_loss": True}),
        ("pt", {"gradient_accumulation_steps": 3, "disable_gradient_checkpointing": True}),
    ],
    ids=["packed", "evaluated", "dft", "pt"],
)
def test_llamafactory_trains_as_with_whole_logits(
    train_yaml: TrainYaml, run_exp: RunExp, monkeypatch: Any, tmp_path: Path, stage: str, options: dict[str, Any]
) -> None:
    """Nobody needs the logits of all tokens, metrics included. Steps are small: a token may tip to another expert."""
    made: list[LazyLogits] = []
    of = LazyLogits.of

    def noted(*args: Any) -> LazyLogits:
        made.append(of(*args))
        return made[-1]

    def compute(self: LazyLogits) -> Tensor:
        raise AssertionError("somebody looks at the logits")

    for name, chunk in (("whole", 10**6), ("chunks", CHUNK)):
        monkeypatch.setattr(lazy_logits, "_FEWEST_TOKENS", chunk)
        monkeypatch.setattr(LazyLogits, "of", noted)
        monkeypatch.setattr(LazyLogits, "compute", compute)
        shared = {"save_strategy": "no", "learning_rate": 1e-6, "output_dir": str(tmp_path / name)}
        run_exp(train_yaml("dsv3", stage, **shared | options))
        assert bool(made) == (name == "chunks")
    whole, chunks = (runs.logged(tmp_path / name) for name in ("whole", "chunks"))
    assert len(whole) == len(chunks) == 2
    for one, other in zip(chunks, whole, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=5e-3)
    if "eval_dataset" in options:
        first, second = (evaluated(tmp_path / name) for name in ("whole", "chunks"))
        assert len(first) == 2 and first[0].keys() >= {"eval_loss", "eval_accuracy"}
        for key in ("eval_loss", "eval_accuracy"):
            assert [each[key] for each in second] == pytest.approx([each[key] for each in first], rel=1e-4)


def evaluated(output: Path) -> list[dict[str, float]]:
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [entry for entry in history if "eval_loss" in entry]


@pytest.mark.parametrize("stage", ["dpo", "kto", "rm"])
def test_other_stages_train_as_ever(
    train_yaml: TrainYaml, run_exp: RunExp, monkeypatch: Any, tmp_path: Path, stage: str
) -> None:
    for name, chunk in (("whole", 10**6), ("chunks", CHUNK)):
        monkeypatch.setattr(lazy_logits, "_FEWEST_TOKENS", chunk)
        run_exp(train_yaml("qwen3moe", stage, save_strategy="no", output_dir=str(tmp_path / name)))
    whole, chunks = (runs.logged(tmp_path / name) for name in ("whole", "chunks"))
    for one, other in zip(chunks, whole, strict=True):
        for key in ("loss", "grad_norm"):
            assert one[key] == pytest.approx(other[key], rel=1e-4), key


def test_an_evaluation_by_itself_holds_no_logits(base: Path, tmp_path: Path) -> None:
    run = runs.trainer(base, tmp_path, label_names=["labels"])
    run.args.prediction_loss_only = True
    with Largest() as largest:
        found = run.evaluate()
    assert largest.rows == CHUNK
    assert "forward" not in vars(head_of(run.model))
    lazy_logits._FEWEST_TOKENS = 10**6
    assert found["eval_loss"] == pytest.approx(run.evaluate()["eval_loss"], rel=1e-6)
