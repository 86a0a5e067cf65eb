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
from accelerate.utils import convert_outputs_to_fp32
from adapted import distance, randomize
from given import Checkpoint, RunExp, TrainYaml
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss.loss_utils import ForCausalLMLoss

from ktft.model import lazy_logits
from ktft.model.lazy_logits import LazyLogits, LazyOutput, chunk_tokens, loss_bytes
from ktft.train.loss import LossInChunks, loss_room

CHUNK = 5
"""Tokens of a chunk."""
WORDS = 320
IGNORED = -100
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


class Largest(TorchDispatchMode):
    """The most rows of logits, of their copies or gradients, that an operation has made."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for each in out if isinstance(out, tuple | list) else (out,):
            of_words = isinstance(each, Tensor) and each.shape[-1:] == (WORDS,) and func is not torch.ops.aten.t.default
            if of_words and not each.is_meta and not isinstance(each, LazyLogits):
                self.rows = max(self.rows, each.shape[:-1].numel())
        return out


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
        for key, grad in grads.items():
            assert grad.any() and distance(others[key], grad) < (0.05 if autocast else 1e-3), (
                key
            )  # kernels of experts round to bf16
        logits = out.logits[0, 3].tolist()  # a real tensor after the step too
        assert logits == pytest.approx(head_logits(model, autocast)[0, 3].tolist(), abs=1e-5)


def head_logits(model: nn.Module, autocast: bool) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, autocast):
        return model(**batch()).logits  # type: ignore[no-any-return]


# --- what is done with logits -----------------------------------------------------------------------------------------


class Passed(torch.autograd.Function):
    """What DDP does with a model's outputs, or a function of somebody's own: torch alone sees the logits."""

    @staticmethod
    def forward(ctx: Any, kind: str, logits: Tensor) -> Tensor:
        return logits if kind == "as they are" else logits.clone() if kind == "copied" else logits * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        return None, 5 * grad


TARGETS = torch.randint(WORDS, (3, 20), generator=torch.Generator().manual_seed(4))
TARGETS[:, :8] = IGNORED
FLAT, SHIFTED = TARGETS.flatten(), TARGETS[:, 1:].flatten()
NONE = torch.full_like(TARGETS, IGNORED)
MASK = torch.arange(60).view(3, 20) % 3 == 0


def after_view_in_place(logits: Tensor) -> Tensor:
    logits[:, :-1].div_(3)
    return logits**2


def after_change(logits: Tensor) -> Tensor:
    logits.div_(3)
    return F.cross_entropy(logits.view(-1, WORDS), FLAT)


LAZY: dict[str, Callable[[Any], Tensor]] = {
    "causal": lambda o: ForCausalLMLoss(o, TARGETS, WORDS),
    "items": lambda o: ForCausalLMLoss(o, TARGETS, WORDS, num_items_in_batch=77),
    "shifted labels": lambda o: ForCausalLMLoss(o, None, WORDS, shift_labels=TARGETS),
    "another index": lambda o: ForCausalLMLoss(o, TARGETS.clamp(min=0), WORDS, ignore_index=0),
    "nothing counts": lambda o: ForCausalLMLoss(o, NONE, WORDS),
    "nothing counts among items": lambda o: ForCausalLMLoss(o, NONE, WORDS, num_items_in_batch=5),
    "cap": lambda o: ForCausalLMLoss(torch.tanh(o / 3.0) * 3.0, TARGETS, WORDS),
    "each": lambda o: F.cross_entropy(o.float().view(-1, WORDS), FLAT, reduction="none"),
    "smoothed": lambda o: nn.CrossEntropyLoss(label_smoothing=0.2)(o.float().reshape(-1, WORDS), FLAT),
    "shifted": lambda o: F.cross_entropy(o.float()[..., :-1, :].contiguous().view(-1, WORDS), SHIFTED),
    "narrow": lambda o: F.cross_entropy(o.view(-1, WORDS), FLAT),
    "of a mask": lambda o: F.cross_entropy(o.float()[MASK], TARGETS[MASK]),
    "scaled": lambda o: F.cross_entropy((2 * o.detach().float() * 0.3 + 0 * o.sum())[0], TARGETS[0]),
}
REAL: dict[str, Callable[[Any], Tensor]] = {
    "log probabilities": lambda o: o[:, :-1].log_softmax(-1).gather(2, TARGETS[:, 1:].clamp(min=0).unsqueeze(2)),
    "transposed": lambda o: o.transpose(0, 1)[3:].tanh(),
    "a word": lambda o: o[:, :, 5],
    "some words": lambda o: o[..., 3:9] + o[..., [1]],
    "rows of a list": lambda o: o[[True, False, True]].float() * 2,
    "split": lambda o: torch.cat([F.log_softmax(each, -1) for each in o.reshape(-1, WORDS).split(7, dim=0)]),
    "flat": lambda o: o.flatten(0, 1).exp() + o.view(-1)[:1],
    "by a tensor": lambda o: o * torch.linspace(0, 1, WORDS, dtype=o.dtype),
    "weighted": lambda o: F.cross_entropy(o.view(-1, WORDS), FLAT, torch.linspace(1, 2, WORDS, dtype=o.dtype)),
    "transposed loss": lambda o: F.cross_entropy(o.transpose(1, 2), TARGETS),
    "in place": after_view_in_place,
    "changed": after_change,
    "looked at before": lambda o: ForCausalLMLoss(o.float() + 0 * o.mean(), TARGETS, WORDS),
    "passed": lambda o: ForCausalLMLoss(Passed.apply("as they are", o), TARGETS, WORDS),
    "passed as a copy": lambda o: ForCausalLMLoss(Passed.apply("copied", o), TARGETS, WORDS),
    "passed doubled": lambda o: Passed.apply("doubled", o) ** 2,
}


class Coded(nn.Linear):
    """A frozen layer whose weight is one byte an element."""

    def __init__(self, hidden: int, words: int) -> None:
        super().__init__(hidden, words, bias=False)
        codes = torch.randint(256, (words, hidden), generator=torch.Generator().manual_seed(3))
        self.weight = nn.Parameter(codes.to(torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight.to(x.dtype) - 128) / 400)


def of_head(forward: Callable[[Tensor], Tensor], use: Callable[[Any], Tensor], dtype: torch.dtype) -> list[Tensor]:
    """What somebody makes of logits, and the gradient of the hidden states."""
    torch.manual_seed(5)
    hidden = torch.randn(3, 20, 16).to(dtype).requires_grad_()
    out = use(forward(hidden * 1))
    out.sum().backward()
    assert hidden.grad is not None
    return [out.detach(), hidden.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("use", LAZY | REAL)
def test_lazy_logits_are_as_real_ones(use: str, dtype: torch.dtype) -> None:
    head = Coded(16, WORDS)
    real = of_head(head, (LAZY | REAL)[use], dtype)
    with Largest() as largest:
        lazy = of_head(LazyOutput(head), (LAZY | REAL)[use], dtype)
    exact = use not in LAZY or dtype == torch.float32
    for one, other in zip(lazy, real, strict=True):
        assert one.dtype == other.dtype and type(one) is Tensor
        torch.testing.assert_close(
            one, other, rtol=1e-4 if exact else 0.02, atol=1e-6 if exact else 2e-4, equal_nan=True
        )
    assert (largest.rows <= CHUNK) == (use in LAZY and use != "scaled")


def test_prompts_have_no_logits() -> None:
    rows: list[int] = []
    head = nn.Linear(16, WORDS).requires_grad_(False)
    forward = head.forward
    head.forward = lambda x: rows.append(x.shape[:-1].numel()) or forward(x)  # type: ignore[method-assign,func-returns-value]
    loss = ForCausalLMLoss(LazyOutput(head)(torch.randn(3, 20, 16)), TARGETS, WORDS)
    assert loss > 0
    assert rows == [1, *[CHUNK] * 7, 1]  # the first tells the logits' dtype; 36 labels


def test_evaluation_computes_no_gradients() -> None:
    head, calls = LazyOutput(Coded(16, WORDS)), []
    head._forward = lambda x, forward=head._forward: calls.append(torch.is_grad_enabled()) or forward(x)
    hidden = torch.randn(3, 20, 16, requires_grad=True)
    with torch.no_grad():
        loss = ForCausalLMLoss(head(hidden), TARGETS, WORDS)
    with torch.inference_mode():
        same = ForCausalLMLoss(head(hidden), TARGETS, WORDS)
    assert loss == same and not loss.requires_grad
    assert not any(calls)


def test_best_words_are_found_in_chunks() -> None:
    head, hidden = Coded(16, WORDS), torch.randn(3, 20, 16)
    with Largest() as largest:
        found = LazyOutput(head)(hidden).detach().argmax(dim=-1)
    assert largest.rows == CHUNK
    assert torch.equal(found, head(hidden).argmax(-1))
    assert torch.equal(LazyOutput(head)(hidden).argmax(1), head(hidden).argmax(1))


def test_outputs_become_fp32_without_being_computed() -> None:
    """As accelerate makes them after a forward under autocast."""
    head = Coded(16, WORDS)
    hidden = torch.randn(3, 20, 16)

    def forward(hidden: Tensor) -> dict[str, Tensor]:
        return {"logits": LazyOutput(head)(hidden.bfloat16())}

    logits = convert_outputs_to_fp32(forward)(hidden)["logits"]
    assert isinstance(logits, LazyLogits) and not logits.computed and logits.dtype == torch.float32
    assert torch.equal(logits.exp(), head(hidden.bfloat16()).float().exp())


def test_logits_pass_through_autograd_without_being_computed() -> None:
    """As through DDP, which marks a model's outputs."""
    hidden = torch.randn(3, 20, 16, requires_grad=True)
    for kind in ("as they are", "copied"):
        with Largest() as largest:
            assert isinstance(Passed.apply(kind, LazyOutput(Coded(16, WORDS))(hidden * 1)), LazyLogits)
        assert largest.rows == 1, kind  # which told the logits' dtype


def test_the_loss_needs_no_copy_in_fp32() -> None:
    """A chunk's log-softmax reads bf16 and writes fp32, in one kernel on a GPU."""
    logits: Any = LazyOutput(Coded(16, WORDS))(torch.randn(3, 20, 16).bfloat16())
    assert (logits / 3).float()._recipe.unwidened.dtype == torch.bfloat16
    assert logits.float().bfloat16()._recipe.unwidened is None


def test_few_tokens_have_real_logits() -> None:
    assert type(LazyOutput(Coded(16, WORDS))(torch.randn(1, CHUNK, 16))) is Tensor


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
    assert loss_room(run, 1000) == loss_bytes(1000, WORDS, 64, 4) == CHUNK * WORDS * 8 + 2 * 1000 * 64 * 4
    runs.reduce_loss(run, "mean")
    assert loss_room(run, 1000) == 1000 * WORDS * 16
    chunks.close()


def test_a_chunk_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert chunk_tokens(129_280) == 259
    assert chunk_tokens(10**7) == 32
    assert loss_bytes(65_536, 129_280, 7168, 2) < 2.2e9


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
