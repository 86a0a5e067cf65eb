"""LoRA on routed experts through PEFT: what it reaches, what it computes, what it writes and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import adapted, distance, load, logits, lora_config, merged_stock_model
from given import Checkpoint
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from ktft.adapters.lora import Rank
from ktft.adapters.peft import expert_layers, get_peft_model, load_adapter
from ktft.config import PROJECTIONS

IDS = torch.arange(3, 35).reshape(2, 16)
KEY = "base_model.model.model.layers.1.mlp.experts.5.up_proj.lora_B.weight"


@pytest.fixture
def qwen(tiny_checkpoint: Checkpoint) -> torch.nn.Module:
    return load(tiny_checkpoint("qwen3moe"))


@pytest.fixture(scope="module")
def saved(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of `qwen`. Copy it before changing it."""
    path = tmp_path_factory.mktemp("adapter")
    adapted(tiny_checkpoint("qwen3moe")).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3moe", {}),
        ("dsv2", {"use_rslora": True}),
        ("dsv3", {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"gate_proj": 5}}),
    ],
)
def test_saved_adapter_is_standard_and_exact(
    tiny_checkpoint: Checkpoint, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    """The saved file gives the same logits when merged by hand into stock transformers and when loaded again."""
    torch.manual_seed(0)  # whatever ran before: some random lora_A make a token choose another expert in bf16
    model = adapted(tiny_checkpoint(family), **options)
    trained = logits(model)
    with model.disable_adapter():
        base = logits(model)
    model.save_pretrained(tmp_path)

    def scaling(name: str) -> float:
        leaf = name.rpartition(".")[2]
        rank = Rank(options.get("rank_pattern", {}).get(leaf, 4), options.get("alpha_pattern", {}).get(leaf, 8))
        return rank.scaling(options.get("use_rslora", False))

    stock = logits(merged_stock_model(tiny_checkpoint(family), tmp_path, scaling))
    effect = distance(base, stock)
    assert distance(trained, stock) < 0.02 * effect
    again = load_adapter(load(tiny_checkpoint(family)), tmp_path)
    assert torch.equal(logits(again), trained)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.model.layers.2.mlp.experts.7.gate_proj.lora_A.weight" in names
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert set(PROJECTIONS) < set(config["target_modules"])
    assert "gate" not in config["target_modules"]
    assert not list(tmp_path.glob(".saving-*"))


def test_layers_to_transform_counts_layers_not_experts(qwen: torch.nn.Module) -> None:
    model = get_peft_model(qwen, lora_config(target_modules=["gate_proj"], layers_to_transform=[2]))
    assert [name.split(".")[-3] for name in expert_layers(model)] == ["2"]


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("qwen3moe", {"target_modules": ["q_proj", "qproj"]}, "'qproj' matches nothing.*q_proj"),
        ("qwen3moe", {"target_modules": r".*nothing"}, "matches nothing"),
        ("dsv2", {"target_modules": ["q_proj", "gate"]}, "'gate' matches the router"),
        ("qwen3moe", {"target_modules": ["experts.0.gate_proj"]}, "1 of the 8 experts"),
        ("qwen3moe", {"rank_pattern": {r"experts\.0\.up_proj": 2}}, "differ between experts"),
        ("qwen3moe", {"use_dora": True}, "DoRA"),
        ("qwen3moe", {"layer_replication": [(0, 2), (1, 3)]}, "replication of layers"),
        ("qwen3moe", {"init_lora_weights": "olora"}, "needs the experts' full weights"),
        ("qwen3moe", {"target_parameters": ["mlp.experts.down_proj"]}, "no torch parameters"),
    ],
)
def test_refused_configs(tiny_checkpoint: Checkpoint, family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_peft_model(load(tiny_checkpoint(family)), lora_config(**options))


def test_stock_model_is_refused(tiny_checkpoint: Checkpoint) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("qwen3moe"))
    with pytest.raises(ValueError, match="quantization_config=KtftConfig"):
        get_peft_model(model, lora_config())


def test_bad_paths(tmp_path: Path, qwen: torch.nn.Module) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        load_adapter(qwen, tmp_path / "absent")
    with pytest.raises(ValueError, match=r"has no adapter_config\.json"):
        load_adapter(qwen, tmp_path)


def test_several_adapters_one_active(qwen: torch.nn.Module, saved: Path) -> None:
    model = load_adapter(qwen, saved)
    first = logits(model)
    model.add_adapter("second", lora_config(target_modules=["experts"]))
    assert torch.equal(logits(model), first)
    model.set_adapter("second")
    with model.disable_adapter():
        base = logits(model)
    assert torch.equal(logits(model), base)  # its B is zero
    model.set_adapter("default")
    model.delete_adapter("second")
    assert torch.equal(logits(model), first)


def test_merging_is_refused_and_changes_nothing(qwen: torch.nn.Module, saved: Path) -> None:
    model = load_adapter(qwen, saved)
    before = logits(model)
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ValueError, match="keeps adapters unmerged"):
            merge()
    assert torch.equal(logits(model), before)


def test_parameters_stay_on_the_cpu_but_follow_casts(qwen: torch.nn.Module) -> None:
    model = get_peft_model(qwen, lora_config(target_modules=["experts"]))
    parameters = [p for name, p in model.named_parameters() if ".experts.lora_" in name]
    assert len(parameters) == 3 * 6
    assert all(p.dtype == torch.float32 and p.requires_grad for p in parameters)
    model._apply(lambda t: t.to("meta", torch.bfloat16))  # as .to("cuda", torch.bfloat16) where there is no GPU
    moved = [p for name, p in model.named_parameters() if ".experts.lora_" in name]
    assert all(p.device.type == "cpu" and p.dtype == torch.bfloat16 for p in moved)
    assert model.lm_head.weight.is_meta


def test_initialization_is_that_of_peft(qwen: torch.nn.Module) -> None:
    torch.manual_seed(0)
    layer = next(iter(expert_layers(get_peft_model(qwen, lora_config(r=16))).values()))
    for projection, fan_in in (("gate_proj", 64), ("down_proj", 32)):
        a, b = layer.lora_A["default"][projection].detach(), layer.lora_B["default"][projection]
        bound = fan_in**-0.5
        assert a.abs().max() <= bound
        assert float(a.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
        assert not b.any()


@pytest.mark.parametrize("reentrant", [True, False])
def test_dropout_repeats_in_recomputation_and_is_off_in_eval(
    qwen: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, reentrant: bool
) -> None:
    model = get_peft_model(qwen, lora_config(lora_dropout=0.3))
    seen: list[tuple[float, int]] = []
    for layer in expert_layers(model).values():
        forward = layer.base_layer.forward

        def spy(*args: Any, forward: Any = forward, **kwargs: Any) -> Tensor:
            seen.append((kwargs["lora"].dropout, kwargs["lora"].seed))
            return forward(*args, **kwargs)

        monkeypatch.setattr(layer.base_layer, "forward", spy)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert len(seen) == 6
    assert seen[:3] == seen[:2:-1]  # backward recomputes the last layer first
    assert len({seed for _, seed in seen}) == 3
    assert {dropout for dropout, _ in seen} == {0.3}
    seen.clear()
    logits(model)
    assert set(seen) == {(0.0, 0)}


def test_training_continues_from_a_saved_adapter(tiny_checkpoint: Checkpoint, saved: Path, tmp_path: Path) -> None:
    model = load_adapter(load(tiny_checkpoint("qwen3moe")), saved, is_trainable=True).train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.item())
        assert all(p.grad is not None for p in trainable)
        optimizer.step()
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "next")
    assert torch.equal(logits(load_adapter(load(tiny_checkpoint("qwen3moe")), tmp_path / "next")), logits(model))


def test_plain_load_state_dict_checks_experts(tiny_checkpoint: Checkpoint, saved: Path) -> None:
    """Without load_adapter too, the layer itself refuses missing or mismatched experts."""
    model, other = (adapted(tiny_checkpoint("qwen3moe"), r=r) for r in (4, 2))
    found = load_file(saved / "adapter_model.safetensors").items()
    tensors = {name.replace(".weight", ".default.weight"): tensor for name, tensor in found if ".experts." in name}
    with pytest.raises(ValueError, match=r"shape \(4, \d\d\) in the adapter and \(2, \d\d\) in the model"):
        other.load_state_dict(tensors, strict=False)
    del tensors[KEY.replace(".weight", ".default.weight")]
    with pytest.raises(ValueError, match=r"experts\.5\.up_proj\.lora_B\.default\.weight is missing: .* 7 experts"):
        model.load_state_dict(tensors, strict=False)
