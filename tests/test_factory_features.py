"""LLaMA-Factory's features on ktft's experts, against LLaMA-Factory on transformers' own experts or against itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import distance, load_as_stored, tensors_of
from given import Checkpoint, RunExp, TrainYaml
from runs import logged
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import ktft

ATTENTION = "q_proj,v_proj,o_proj"
ONE = {
    "gradient_accumulation_steps": 1
}  # random numbers, here of noise and of the value head's dropout, are drawn alike
SGD = {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0}  # an adapter's change is its gradient


def changes(output: Path, part: str) -> Tensor:
    """All B of an adapter, which began at zero, whose names have a part."""
    found = [t.flatten() for name, t in sorted(tensors_of(output).items()) if "lora_B" in name and part in name]
    return torch.cat(found)


@pytest.fixture(scope="module")
def in_fp32(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose rounding does not hide a difference."""
    path = tmp_path_factory.mktemp("fp32")
    AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen3moe"), dtype=torch.float32).save_pretrained(path)
    AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3moe")).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        ("sft", {"packing": True, "cutoff_len": 128}),
        ("sft", {"neat_packing": True, "cutoff_len": 128}),
        ("sft", {"neftune_noise_alpha": 5, "use_dft_loss": True} | ONE),
        ("pt", {}),
        ("rm", ONE),
        ("dpo", {}),
        ("dpo", {"pref_loss": "orpo"}),
        ("kto", {}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_trains_as_on_stock_experts(
    train_yaml: TrainYaml, run_exp: RunExp, in_fp32: Path, tmp_path: Path, stage: str, options: dict[str, Any]
) -> None:
    """With LoRA on attention alone, losses, gradient norms and B after two steps are those of stock experts.

    Most steps have two micro-batches, which go through ktft's layers together, but not through stock ones.
    """
    config = train_yaml("qwen3moe", stage, lora_target=ATTENTION, save_strategy="no", **SGD | {"learning_rate": 0.05})
    config["gradient_accumulation_steps"] = 2
    config["model_name_or_path"] = str(in_fp32)
    config |= options
    stock = {key: value for key, value in config.items() if key not in ("use_kt", "kt_config")}
    for name, settings in (("ours", config), ("stock", stock)):
        run_exp(settings | {"output_dir": str(tmp_path / name)})
    ours, theirs = logged(tmp_path / "ours"), logged(tmp_path / "stock")
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-2)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)
    assert distance(changes(tmp_path / "ours", "lora"), changes(tmp_path / "stock", "lora")) < 0.05


def test_accumulated_gradients_are_those_of_one_batch(train_yaml: TrainYaml, run_exp: RunExp, tmp_path: Path) -> None:
    for name, rows, steps in (("whole", 8, 1), ("parts", 2, 4)):
        batch = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps, "max_steps": 1}
        run_exp(train_yaml("dsv3", bf16=True, output_dir=str(tmp_path / name), save_strategy="no", **batch, **SGD))
    assert logged(tmp_path / "parts")[0]["loss"] == pytest.approx(logged(tmp_path / "whole")[0]["loss"], rel=1e-3)
    for part in (".experts.", ".shared_experts.", ".self_attn."):
        whole, parts = (changes(tmp_path / name, part) for name in ("whole", "parts"))
        assert whole.abs().max() > 0
        assert distance(parts, whole) < 0.02


def test_gradient_checkpointing_changes_no_bit(train_yaml: TrainYaml, run_exp: RunExp, tmp_path: Path) -> None:
    """With dropout, whose masks recomputation must repeat."""
    modes = {
        "off": {"disable_gradient_checkpointing": True},
        "reentrant": {},
        "not reentrant": {"use_reentrant_gc": False},
        "recompute": {"kt_config": {"expert_format": "bf16", "threads": 1, "activation": "recompute"}},
    }
    for name, options in modes.items():
        shared = {"lora_dropout": 0.2, "bf16": True, "save_strategy": "no", "output_dir": str(tmp_path / name)}
        run_exp(train_yaml("dsv3", **shared | options))
    off = tensors_of(tmp_path / "off")
    for name in list(modes)[1:]:
        assert [e["loss"] for e in logged(tmp_path / name)] == [e["loss"] for e in logged(tmp_path / "off")]
        assert all(torch.equal(off[key], tensor) for key, tensor in tensors_of(tmp_path / name).items()), name


def test_compute_accuracy_counts_right_tokens(
    train_yaml: TrainYaml, run_exp: RunExp, tiny_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamafactory.train.sft.trainer import CustomSeq2SeqTrainer

    adapter, output, rows = tmp_path / "adapter", tmp_path / "eval", []
    learn = {"per_device_train_batch_size": 16, "max_steps": 8, "learning_rate": 0.02, "save_strategy": "no"}
    run_exp(train_yaml("qwen3moe", output_dir=str(adapter), **learn))
    original = CustomSeq2SeqTrainer.evaluate

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        rows.extend(self.eval_dataset)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(CustomSeq2SeqTrainer, "evaluate", spy)
    evaluate = {"do_train": False, "do_eval": True, "dataset": None, "eval_dataset": "sft", "compute_accuracy": True}
    run_exp(train_yaml("qwen3moe", output_dir=str(output), adapter_name_or_path=str(adapter), **evaluate))
    model = ktft.load_adapter(load_as_stored(tiny_checkpoint("qwen3moe")), adapter)
    shares = []
    for row in rows:
        ids, labels = (torch.tensor([row[key]]) for key in ("input_ids", "labels"))
        with torch.no_grad():
            guess = model(input_ids=ids).logits.argmax(-1)[:, :-1]
        counted = labels[:, 1:] != -100
        shares.append((guess == labels[:, 1:])[counted].float().mean().item())
    expected = sum(shares) / len(shares)
    assert expected > 0.1
    assert json.loads((output / "eval_results.json").read_text())["eval_accuracy"] == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("chained", [False, True], ids=["one adapter", "chained"])
def test_predict_with_generate_writes_what_the_adapter_says(
    train_yaml: TrainYaml, run_exp: RunExp, tiny_checkpoint: Checkpoint, tmp_path: Path, chained: bool
) -> None:
    for package in ("jieba", "nltk", "rouge_chinese"):  # what LLaMA-Factory asks for to score the predictions
        pytest.importorskip(package)
    from ktft.adapters.several import stand_on

    first, second, output = tmp_path / "first", tmp_path / "second", tmp_path / "predict"
    learn = {"learning_rate": 0.05, "max_steps": 4, "save_strategy": "no"}
    run_exp(train_yaml("qwen3moe", output_dir=str(first), **learn))
    if chained:
        new = {"adapter_name_or_path": str(first), "create_new_adapter": True}
        run_exp(train_yaml("qwen3moe", output_dir=str(second), **learn, **new))
    predict = {"do_train": False, "do_predict": True, "predict_with_generate": True, "dataset": None}
    adapters = f"{first},{second}" if chained else str(first)
    greedy = {"eval_dataset": "sft", "max_samples": 4, "max_new_tokens": 8, "do_sample": False}
    run_exp(train_yaml("qwen3moe", output_dir=str(output), adapter_name_or_path=adapters, **predict, **greedy))
    base = load_as_stored(tiny_checkpoint("qwen3moe"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint("qwen3moe"))
    model = ktft.load_adapter(base, second if chained else first)
    if chained:
        stand_on(model, [first])
    lines = [json.loads(line) for line in (output / "generated_predictions.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    said = []
    for line in lines:
        ids = tokenizer(line["prompt"], return_tensors="pt", add_special_tokens=False)
        answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
        assert line["predict"] == tokenizer.decode(answer, skip_special_tokens=True)
        with model.disable_adapter():
            answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
        said.append(tokenizer.decode(answer, skip_special_tokens=True))
    assert said != [line["predict"] for line in lines]
    assert "predict_rouge-l" in json.loads((output / "predict_results.json").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"finetuning_type": "full"}, "finetuning_type is 'full'.*set finetuning_type: lora"),
        ({"finetuning_type": "freeze"}, "finetuning_type is 'freeze'.*set finetuning_type: lora"),
        ({"finetuning_type": "oft"}, "finetuning_type is 'oft'.*set finetuning_type: lora"),
        ({"use_dora": True}, "use_dora is True.*use plain LoRA, or use_rslora"),
        ({"pissa_init": True}, "pissa_init is True.*use the default initialization"),
        ({"stage": "ppo", "reward_model": "m"}, "stage is 'ppo'"),
    ],
    ids=str,
)
def test_refused_before_anything_is_loaded(
    train_yaml: TrainYaml, run_exp: RunExp, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], message: str
) -> None:
    def load_nothing(*_: Any, **__: Any) -> None:
        pytest.fail("a tokenizer was loaded")

    monkeypatch.setattr("llamafactory.model.loader.AutoTokenizer.from_pretrained", load_nothing)
    with pytest.raises(ValueError, match=message):
        run_exp(train_yaml("qwen3moe", **options))


@pytest.mark.parametrize("family", ["dsv3", "qwen3moe"])
def test_balance_that_a_model_does_not_have_is_told(
    train_yaml: TrainYaml, run_exp: RunExp, caplog: pytest.LogCaptureFixture, family: str
) -> None:
    """`moe_aux_loss_coef` is a part of the loss in transformers' Qwen3-MoE, and nothing in its DeepSeek-V3."""
    run_exp(train_yaml(family, max_steps=1, moe_aux_loss_coef=0.5, save_strategy="no"))
    message = "moe_aux_loss_coef: 0.5 has no effect: transformers' code of deepseek_v3"
    assert message in caplog.text if family == "dsv3" else "has no effect" not in caplog.text
