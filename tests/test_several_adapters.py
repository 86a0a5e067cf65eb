"""Several adapters on one model: active together, one after another, frozen beneath the one that trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import distance, load, load_as_stored, logits, merged_stock_model, randomize, write_into
from given import Checkpoint, RunExp, TrainYaml
from peft import LoraConfig
from runs import DATA, arguments, logged, losses
from safetensors.torch import load_file
from torch import Tensor
from transformers import Trainer

import ktft
from ktft.adapters.peft import expert_layers
from ktft.adapters.several import stand_on
from ktft.lora import MAX_RANK

FIRST: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["experts", "q_proj"]}
SECOND: dict[str, Any] = {"r": 3, "lora_alpha": 5, "target_modules": ["down_proj", "o_proj"], "use_rslora": True}
IDS = torch.arange(3, 43).reshape(2, 20)
SCALING = {"default": 8 / 4, "second": 5 / 3**0.5}


def lora(**options: Any) -> LoraConfig:
    return LoraConfig(**{"task_type": "CAUSAL_LM"} | FIRST | options)


def two_adapters(checkpoint: Path, **options: Any) -> Any:
    model: Any = ktft.get_peft_model(load(checkpoint), lora(**options))
    model.add_adapter("second", lora(**SECOND | options))
    return randomize(model)


def trainable(model: Any) -> set[str]:
    """Names of adapters with parameters that require a gradient, and of base weights that do."""
    names = [name.split(".") for name, p in model.named_parameters() if p.requires_grad]
    return {next((part for part in name if part in (*model.peft_config,)), ".".join(name)) for name in names}


def save_small(checkpoint: Path, path: Path, seed: int, **options: Any) -> Path:
    """A saved adapter that matters."""
    model = ktft.get_peft_model(load(checkpoint), lora(**options))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    model.save_pretrained(path)
    return path


def pairs_of(both: Any, one: Any) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Kind of a tensor of experts' LoRA; it in the two adapters of a model, and in the one of another."""
    for layer, joined in zip(expert_layers(both).values(), expert_layers(one).values(), strict=True):
        tensors = (layer.tensors("default"), layer.tensors("second"), joined.tensors("default"))
        for (kind, _, first), (_, _, second), (_, _, whole) in zip(*tensors, strict=True):
            yield kind, first, second, whole


# --- active together --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3moe", "dsv2"])
def test_active_together_is_the_sum_of_both(tiny_checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Other ranks, scalings and targets; against stock transformers with both deltas in its weights."""
    model = two_adapters(tiny_checkpoint(family))
    alone = {}
    for name in ("default", "second"):
        model.set_adapter(name)
        alone[name] = logits(model)
    model.set_adapter(["default", "second"])
    assert model.active_adapters == ["default", "second"]
    both = logits(model)
    with model.disable_adapter():
        base = logits(model)
    model.save_pretrained(tmp_path)
    stock = merged_stock_model(tiny_checkpoint(family), tmp_path, lambda _: SCALING["default"])
    write_into(stock, tmp_path / "second", lambda _: SCALING["second"])
    expected = logits(stock)
    smallest = min(distance(other, expected) for other in (base, *alone.values()))
    assert distance(both, expected) < 0.02 * smallest
    assert torch.equal(logits(model), both)
    with pytest.raises(ValueError, match="DoRA on routed experts"):
        model.add_adapter("third", lora(use_dora=True))
    assert torch.equal(logits(model), both)
    assert not any(".third" in name for name, _ in model.named_parameters())
    model.delete_adapter("second")
    assert torch.equal(logits(model), alone["default"])
    assert trainable(model) == {"default"}
    assert torch.equal(logits(model.unload()), base)


def test_gradients_are_those_of_one_adapter_of_both_ranks(base: Path) -> None:
    """A frozen adapter beside one that trains: gradients as if they were one, for the one alone."""
    options = {"lora_alpha": 16, "target_modules": ["experts"]}
    both = ktft.get_peft_model(load(base), lora(r=8, **options))
    both.add_adapter("second", lora(r=8, **options))
    randomize(both).set_adapter(["second", "default"])
    both.set_requires_grad("default", False)
    assert trainable(both) == {"second"}
    one = ktft.get_peft_model(load(base), lora(r=16, lora_alpha=32, target_modules=["experts"]))
    for kind, first, second, whole in pairs_of(both, one):
        # In the order in which they are active, or sums over ranks are rounded otherwise and bf16 carries it on
        whole.data.copy_(torch.cat([second, first], dim=1 if kind == "lora_A" else 2))
    for model in (both, one):
        model.train()(input_ids=IDS, labels=IDS).loss.backward()
    for kind, first, second, whole in pairs_of(both, one):
        assert first.grad is None
        expected = whole.grad[:, :8] if kind == "lora_A" else whole.grad[..., :8]
        assert expected.abs().max() > 0
        assert distance(second.grad, expected) < 1e-5


def test_dropout_of_adapters_active_together(base: Path) -> None:
    model = two_adapters(base, lora_dropout=0.2)
    model.set_adapter(["default", "second"])
    still = logits(model)
    model.train()
    assert distance(model(input_ids=IDS).logits, still) > 0.01
    assert torch.equal(logits(model), still)
    model.add_adapter("third", lora())
    model.set_adapter(["default", "third"])
    logits(model)
    with pytest.raises(ValueError, match=r"differ in lora_dropout: default 0\.2, third 0"):
        model.train()(input_ids=IDS)


def test_too_high_ranks_and_unknown_names_are_refused(base: Path) -> None:
    with pytest.raises(ValueError, match=rf"rank of gate_proj on the routed .* is 257; it must be 1 to {MAX_RANK}"):
        ktft.get_peft_model(load(base), lora(r=MAX_RANK + 1, target_modules=["experts"]))
    model = ktft.get_peft_model(load(base), lora(r=200, target_modules=["experts"]))
    model.add_adapter("second", lora(r=56, target_modules=["experts"]))
    model.set_adapter(["default", "second"])
    assert torch.isfinite(logits(model)).all()
    model.add_adapter("third", lora(r=57, target_modules=["down_proj"]))
    model.set_adapter(["default", "third"])
    with pytest.raises(ValueError, match=r"rank 200 \+ 57 together on down_proj .* more than 256; .* ktft merge"):
        logits(model)
    with pytest.raises(ValueError, match="Adapter fourth not found"):
        model.set_adapter(["default", "fourth"])
    with pytest.raises(ValueError, match=r"activate several with model\.set_adapter"):
        model.add_weighted_adapter(["default", "second"], [1.0, 1.0], "sum")
    with pytest.raises(ValueError, match=r"no batches that mix adapters.*model\.set_adapter"):
        model(input_ids=torch.ones(2, 3, dtype=torch.long), adapter_names=["default", "second"])


@pytest.mark.parametrize("family", ["dsv2", "dsv3"])
def test_switching_and_disabling_train_nothing_more(tiny_checkpoint: Checkpoint, family: str) -> None:
    model: Any = ktft.get_peft_model(
        load(tiny_checkpoint(family)), lora(target_modules=["experts", "o_proj"], modules_to_save=["gate"])
    )
    before = trainable(model)
    assert before == {"default"}
    model.add_adapter("second", lora(**SECOND))
    assert trainable(model) == {"default"}
    trained = logits(randomize(model))
    with model.disable_adapter():
        assert distance(logits(model), trained) > 0.01
        assert trainable(model).isdisjoint({"default", "second"})
    assert torch.equal(logits(model), trained)
    assert trainable(model) == {"default"}
    model.set_adapter("second")
    assert trainable(model) == {"second"}  # not the router, which only the first one trains
    model.set_adapter(["second", "default"])
    model.set_requires_grad("default", False)
    with model.disable_adapter():
        pass
    assert trainable(model) == {"second"}
    with pytest.raises(ValueError, match=r"default and third both hold .*mlp\.gate whole.*ktft merge"):
        model.add_adapter("third", lora(target_modules=["experts"], modules_to_save=["gate"]))
        model.set_adapter(["default", "third"])


def test_two_that_train_are_both_trained_and_saved_but_not_resumed(base: Path, tmp_path: Path) -> None:
    model = two_adapters(base)
    model.set_adapter(["default", "second"])
    before = {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_B." in name}
    Trainer(model, arguments(tmp_path, max_steps=2, per_device_train_batch_size=8), train_dataset=DATA).train()
    after = dict(model.named_parameters())
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items())
    for directory, name in (("", "default"), ("second", "second")):
        saved = load_file(tmp_path / "checkpoint-2" / directory / "adapter_model.safetensors")
        shapes = {tensor.shape[0] for key, tensor in saved.items() if "lora_A" in key}
        assert shapes == {model.peft_config[name].r}
    one = arguments(tmp_path / "one", max_steps=2)
    Trainer(two_adapters(base), one, train_dataset=DATA).train()
    with pytest.raises(ValueError, match="resumes one adapter, the model has 2: default, second"):
        Trainer(two_adapters(base), one, train_dataset=DATA).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("name", ["default2", "fault", "proj", "lora", "a.b", ""])
def test_names_that_peft_would_mix_up_are_refused(base: Path, name: str) -> None:
    model: Any = ktft.get_peft_model(load(base), lora())
    with pytest.raises(ValueError, match=f"adapter name '{name}' .*choose another"):
        model.add_adapter(name, lora())
    assert list(model.peft_config) == ["default"]


# --- one on top of another --------------------------------------------------------------------------------------------


def test_training_on_top_of_frozen_adapters(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tiny_checkpoint("qwen3moe")
    one = save_small(path, tmp_path / "one", 1, lora_dropout=0.5)
    two = save_small(path, tmp_path / "two", 2, target_modules=["down_proj"])
    stock = write_into(merged_stock_model(path, one, lambda _: 2.0), two, lambda _: 2.0)

    def adapted() -> Any:
        torch.manual_seed(3)
        model: Any = ktft.get_peft_model(load(path), lora(target_modules=["v_proj"]))
        stand_on(model, [one, two])
        return model

    model = adapted()
    assert trainable(model) == {"default"}
    start = logits(model)
    assert distance(start, logits(stock)) < 2e-3
    assert torch.equal(logits(model.train()), start)  # no dropout below
    below = {name: p.detach().clone() for name, p in model.named_parameters() if ".base_" in name}
    trainer = Trainer(model, arguments(tmp_path / "run", per_device_train_batch_size=8), train_dataset=DATA)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name], tensor) and after[name].grad is None for name, tensor in below.items())
    with model.disable_adapter():
        assert torch.equal(logits(model), start)  # the others count as part of the base model
    assert trainable(model) == {"default"}
    end = logits(model)

    output = tmp_path / "run" / "checkpoint-4"
    assert set(load_file(output / "adapter_model.safetensors")) == {
        f"base_model.model.model.layers.{n}.self_attn.v_proj.lora_{k}.weight" for n in range(3) for k in "AB"
    }
    assert not [child for child in output.iterdir() if child.is_dir()]
    assert f"on top of {one}, {two}" in (output / "README.md").read_text()
    again: Any = ktft.load_adapter(load(path), output)
    stand_on(again, [one, two])
    assert torch.equal(logits(again), end)
    assert not any(p.requires_grad for p in again.parameters())

    rest = Trainer(adapted(), arguments(tmp_path / "rest", per_device_train_batch_size=8), train_dataset=DATA)
    rest.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert losses(rest)[-2:] == losses(trainer)[-2:]
    assert torch.equal(logits(rest.model), end)


def test_what_cannot_stand_on_others_is_refused(base: Path, tmp_path: Path) -> None:
    one = save_small(base, tmp_path / "one", 1, modules_to_save=["gate"])
    with pytest.raises(ValueError, match=r"differ in lora_dropout: default 0\.1, base_1 0; .*set lora_dropout: 0"):
        stand_on(ktft.get_peft_model(load(base), lora(lora_dropout=0.1)), [one])
    with pytest.raises(ValueError, match=r"default and base_1 both hold .*gate whole"):
        stand_on(ktft.get_peft_model(load(base), lora(modules_to_save=["gate"])), [one])
    stand_on(ktft.get_peft_model(load(base), lora(lora_dropout=0.1, target_modules=["q_proj"])), [one])


def eval_loss(run_exp: Any, config: dict[str, Any], output: Path, adapters: str) -> float:
    evaluate = {"do_train": False, "do_eval": True, "eval_dataset": "sft", "per_device_eval_batch_size": 4}
    run_exp(config | {"dataset": None, "output_dir": str(output), "adapter_name_or_path": adapters} | evaluate)
    return float(json.loads((output / "eval_results.json").read_text())["eval_loss"])


def test_llamafactory_chains_adapters(train_yaml: TrainYaml, run_exp: RunExp, base: Path, tmp_path: Path) -> None:
    """Train on a frozen adapter, then go on with both, then evaluate with both and with one alone."""
    first = save_small(base, tmp_path / "first", 1)
    before = load_file(first / "adapter_model.safetensors")
    options = {"lora_target": "experts,v_proj", "per_device_train_batch_size": 16, "max_steps": 3}
    second, third = tmp_path / "second", tmp_path / "third"
    config = train_yaml("qwen3moe", **options)
    new = {"adapter_name_or_path": str(first), "create_new_adapter": True}
    run_exp(config | new | {"output_dir": str(second)})
    trained = load_file(second / "adapter_model.safetensors")
    assert {".".join(name.split(".")[-4:-2]) for name in trained if ".experts." not in name} == {"self_attn.v_proj"}
    assert all(t.any() for name, t in trained.items() if "v_proj.lora_B" in name)
    assert trained["base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight"].shape == (4, 64)

    alone = eval_loss(run_exp, config, tmp_path / "alone", str(first))
    both = eval_loss(run_exp, config, tmp_path / "both", f"{first},{second}")
    assert logged(second)[0]["loss"] == pytest.approx(alone, rel=1e-3)  # starts where the first one ended
    assert both < alone

    run_exp(config | {"adapter_name_or_path": f"{first},{second}", "output_dir": str(third)})
    assert logged(third)[0]["loss"] == pytest.approx(both, rel=1e-3)
    went_on = load_file(third / "adapter_model.safetensors")
    assert went_on.keys() == trained.keys()
    assert any(not torch.equal(went_on[name], tensor) for name, tensor in trained.items())
    after = load_file(first / "adapter_model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_chat_applies_all_adapters(base: Path, tmp_path: Path) -> None:
    from llamafactory.chat import ChatModel

    one, two = (save_small(base, tmp_path / str(seed), seed) for seed in (1, 2))
    settings = {"model_name_or_path": str(base), "template": "default", "use_kt": True}
    settings["kt_config"] = {"expert_format": "bf16", "threads": 1}
    both, alone = (
        logits(ChatModel(settings | {"adapter_name_or_path": adapters}).engine.model)
        for adapters in (f"{one},{two}", str(two))
    )
    model: Any = ktft.load_adapter(load_as_stored(base), two)
    assert torch.equal(logits(model), alone)
    stand_on(model, [one])
    assert torch.equal(logits(model), both)
    assert distance(both, alone) > 0.01


@pytest.mark.parametrize("new", [False, True], ids=["goes on", "new on top"])
def test_dpo_reference_is_the_model_without_what_trains(
    train_yaml: TrainYaml, run_exp: RunExp, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new: bool
) -> None:
    """The base model alone where the adapter goes on training; with that adapter where a new one is put on top."""
    from llamafactory.train.dpo.trainer import CustomDPOTrainer

    first = save_small(base, tmp_path / "first", 1)
    untrained = load_as_stored(base)
    if new:
        untrained = ktft.load_adapter(untrained, first)
    original = CustomDPOTrainer.compute_reference_log_probs
    found: list[tuple[Tensor, ...]] = []

    def spy(self: Any, model: Any, batch: Any) -> Any:
        reference = original(self, model, batch)
        with torch.no_grad():
            others = (self.concatenated_forward(each, batch)["chosen_logps"] for each in (untrained.train(), model))
            found.append((reference[0], *others))
        return reference

    monkeypatch.setattr(CustomDPOTrainer, "compute_reference_log_probs", spy)
    run_exp(train_yaml("qwen3moe", stage="dpo", adapter_name_or_path=str(first), create_new_adapter=new))
    assert len(found) >= 2
    for reference, expected, policy in found:
        assert torch.allclose(reference, expected, rtol=1e-4 if new else 1e-5)
        assert new or (policy - reference).abs().max() > 0.1
    if new:  # the policy is the reference before the first update
        assert logged(tmp_path / "out")[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
