"""Models whose experts have no gate, or limits by layer: everything around training, and configurations refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from adapted import adapted, distance, load, logits, merged_stock_model, tensors_of
from commands import run
from given import Checkpoint
from merging import names_of, weight_of
from quantize import changed
from safetensors.torch import load_file
from stock import same_choices
from tiny import FAMILIES, MORE_FAMILIES, make_config, write_checkpoint
from transformers import AutoModelForCausalLM

import ktft
from ktft import native
from ktft.checkpoint.families import FAMILIES as ROWS
from ktft.checkpoint.families import ROWS as TABLE
from ktft.config import Settings
from ktft.model.experts import find_experts
from ktft.model.load_plan import outline
from ktft.model.shape import MoeShape, shape_of
from ktft.plan import rates
from ktft.plan.description import Description
from ktft.swiglu import GELU_TANH, RELU2, SILU, clamped_after

newest = pytest.mark.skipif("step" not in MORE_FAMILIES, reason="transformers lacks this family")
STEM = "backbone.layers.3.mixer.experts."


def test_convert_verify_and_merge(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Every command that walks an expert's projections finds the two that there are."""
    base, adapter, packed = tiny_checkpoint("nemotron"), tmp_path / "adapter", tmp_path / "packed"
    model = adapted(base)
    model.save_pretrained(adapter)
    assert not [name for name in tensors_of(adapter) if "gate_proj" in name or "out_proj" in name]
    status, said = run("convert", base, packed, "--format", "k4", "--threads", "1", "--report")
    assert status == 0 and "up_proj" in said and "gate_proj" not in said, said
    names = load_file(packed / "experts" / "layer-00003.safetensors")
    assert {name.split(".")[1] for name in names} == set(RELU2.projections)
    direct, read = (find_experts(load(path, expert_format="k4")) for path in (base, packed))
    for name, module in direct.items():
        for projection in RELU2.projections:
            assert torch.equal(*(each[name].layer.dequantize(7, projection) for each in (direct, read)))
        assert module.layer.projections == RELU2.projections
    for path in (base, packed):
        status, said = run("verify", path, "--threads", "1", "--adapter", adapter)
        assert status == 0, said
    status, said = run("merge", base, adapter, tmp_path / "merged", "--format", "bf16")
    assert status == 0, said
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    by_hand = merged_stock_model(base, adapter, lambda _: 2.0)
    for name in names_of(adapter):
        assert distance(weight_of(stock, name), weight_of(by_hand, name)) < 0.003
    for each in (model.get_base_model(), stock):  # rounding tips a near tie now and then
        same_choices(by_hand, each, list(direct))
    by_hand_logits = logits(by_hand)
    assert distance(by_hand_logits, logits(model)) < 0.02
    assert distance(logits(stock), by_hand_logits) < 0.02


def test_plans_count_two_matrices() -> None:
    config = make_config("nemotron")
    shape, model = shape_of(config)
    assert list(shape.moe) == [1, 3, 5]
    for number, moe in shape.moe.items():
        layer = model.get_submodule(f"model.layers.{number}.mixer.experts").layer
        assert moe is layer and not moe.gated and moe.parameters == 2 * 8 * 32 * 96


def test_the_timed_rate_is_that_of_two_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    """ktft plan times a layer of the model's own kind: the kernels have no gate to multiply."""
    made: list[native.ExpertLayer] = []
    original = native.ExpertLayer

    def keep(*args: Any, **options: Any) -> native.ExpertLayer:
        made.append(original(*args, **options))
        return made[-1]

    monkeypatch.setattr(native, "ExpertLayer", keep)
    machine = Description(ram="64G", cores=2, bandwidth="20G").machine()
    moe = MoeShape(8, 2, 64, 96, gated=False)
    found = rates.timed_expert_rate(native.runtime(1), machine, moe, "int8", 16, [], "recompute")
    assert min(found.forward, found.backward, found.pack) > 0
    assert [layer.swiglu for layer in made] == [RELU2]
    assert rates.expert_flops(moe, 10) == 2 * 2 * 10 * 2 * 64 * 96


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["gate_proj"], r"'gate_proj' matches nothing in the model; it has .*experts for the routed experts alone"),
        (["experts.gate_proj"], "'experts.gate_proj' matches nothing"),
        (["out_proj"], r"matches the module .*mixer\.out_proj, whose forward would not use LoRA"),
    ],
)
def test_lora_that_has_no_place_is_refused(tiny_checkpoint: Checkpoint, targets: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        adapted(tiny_checkpoint("nemotron"), target_modules=targets)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("targets", [["experts"], ["experts.up_proj"], r".*experts\.\d+\.down_proj"])
def test_lora_on_some_projections(tiny_checkpoint: Checkpoint, tmp_path: Path, targets: Any) -> None:
    model = adapted(tiny_checkpoint("nemotron"), target_modules=targets)
    model.save_pretrained(tmp_path)
    trained = {name.split(".")[-3] for name in tensors_of(tmp_path)}
    assert trained == (set(RELU2.projections) if targets == ["experts"] else {str(targets).strip("[]'").split(".")[-1]})
    again = ktft.load_adapter(load(tiny_checkpoint("nemotron")), tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_damaged_checkpoints_are_named(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = tiny_checkpoint("nemotron")
    cases = {
        "missing": (lambda t: t.pop(f"{STEM}7.up_proj.weight"), f"lacks expert tensors: {STEM}7.up_proj.weight"),
        "gate": (lambda t: t.update({f"{STEM}7.gate_proj.weight": torch.zeros(96, 32)}), f"no place for: {STEM}7.gate"),
        "shape": (lambda t: t.update({f"{STEM}7.up_proj.weight": torch.zeros(64, 32)}), "needs (96, 32)"),
    }
    for name, (change, message) in cases.items():
        with pytest.raises(ValueError) as error:
            load(changed(source, tmp_path / name, change))
        assert message in str(error.value) and "\n" not in str(error.value), name


# --- activations ------------------------------------------------------------------------------------------------------


def test_names_of_activations() -> None:
    for family, key, name, expected in (
        ("qwen3_moe", "hidden_act", "silu", SILU),
        ("qwen3_moe", "hidden_act", "swish", SILU),
        ("gemma4", "hidden_activation", "gelu_pytorch_tanh", GELU_TANH),
        ("nemotron_h", "mlp_hidden_act", "relu2", RELU2),
    ):
        assert ROWS[family].activation(SimpleNamespace(**{key: name}), 0) == expected


@pytest.mark.parametrize(
    ("family", "key", "name"),
    [
        ("nemotron", "mlp_hidden_act", "silu"),
        ("nemotron", "mlp_hidden_act", "gelu"),
        ("qwen3moe", "hidden_act", "relu2"),
    ],
)
def test_an_activation_that_is_not_computed_is_refused_before_loading(
    tmp_path: Path, family: str, key: str, name: str
) -> None:
    path = write_checkpoint(family, tmp_path, **{key: name})
    for shard in path.glob("*.safetensors"):  # nothing is read of what can never run
        shard.write_bytes(shard.read_bytes()[:-1000])
    config = (FAMILIES | MORE_FAMILIES)[family][0].model_type
    row = next(row for row in TABLE if config in row.model_types)
    with pytest.raises(ValueError, match=f"{key} is '{name}'; ktft computes the experts of {row.name} with ") as error:
        row.activation(make_config(family, **{key: name}), 0)
    assert "give a model whose config.json has one of these" in str(error.value) and "\n" not in str(error.value)
    status, said = run("verify", path, "--threads", "1")
    assert status != 0 and "Traceback" not in said


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"swiglu_limits": [0.0, 7.0]}, r"swiglu_limits is \[0.0, 7.0\], which has none for layer 2: config.json must"),
        ({"swiglu_limits": 7.0}, "swiglu_limits is 7.0, which has none for layer 2"),
        ({"swiglu_limits": [0.0, 0.0, -7.0]}, r"swiglu_limits\[2\] is -7.0; config.json must have a positive number"),
        ({"swiglu_limits": [0.0, 0.0, float("nan")]}, r"swiglu_limits\[2\] is nan"),
        ({"swiglu_limit": "7"}, "swiglu_limit is '7'; config.json must have a positive number there, or null"),
    ],
)
def test_limits_that_are_none_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        ROWS["step3p7"].activation(SimpleNamespace(num_hidden_layers=3, **config), 2)
    assert "\n" not in str(error.value)


def test_limits_by_layer() -> None:
    limits = SimpleNamespace(num_hidden_layers=4, swiglu_limits=[None, 0.0, 7, 16.0])
    found = [ROWS["step3p7"].activation(limits, layer) for layer in range(4)]
    assert found == [SILU, SILU, clamped_after(7.0), clamped_after(16.0)]
    assert ROWS["step3p7"].activation(SimpleNamespace(), 0) == SILU
    before = ROWS["deepseek_v4"].activation(SimpleNamespace(swiglu_limit=7.0), 0)
    assert before.limit == before.gate_most == 7.0 < clamped_after(7.0).gate_most


@newest
def test_a_model_has_the_limits_of_its_layers(tiny_checkpoint: Checkpoint) -> None:
    layers = outline(tiny_checkpoint("step"), Settings(threads=1)).layers
    assert {number: layer.swiglu for number, layer in layers.items()} == {1: SILU, 2: clamped_after(1.2)}


@newest
def test_a_limit_below_zero_is_refused_before_loading(tmp_path: Path) -> None:
    path = write_checkpoint("step", tmp_path)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["swiglu_limits"] = [0.0, 0.0, -1.0]
    (path / "config.json").write_text(json.dumps(config))
    status, said = run("verify", path, "--threads", "1")
    assert status == 2 and "swiglu_limits[2] is -1.0; config.json must have a positive number there" in said


@newest
def test_names_beside_the_stacks_of_a_layer_are_not_experts() -> None:
    is_expert = ROWS["step3p7"].expert_pattern()
    stem = "model.layers.43.moe."
    assert all(
        is_expert.match(f"{stem}{name}_proj.weight{end}")
        for name in ("gate", "up", "down")
        for end in ("", "_scale_inv")
    )
    assert not any(is_expert.match(f"{stem}{name}") for name in ("gate.weight", "router_bias", "gate_proj.bias"))
    assert not is_expert.match("model.layers.43.share_expert.up_proj.weight")
