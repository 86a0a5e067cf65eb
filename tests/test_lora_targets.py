"""What LoRA and additional_target are put on, family by family: that alone is trained, saved and loaded again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import stock
import torch
from adapted import load, logits, lora_config
from given import Checkpoint, RunExp, TrainYaml
from quantize import read_all
from safetensors.torch import load_file
from tiny import FAMILIES, MORE_FAMILIES
from torch import Tensor

import ktft
from ktft.adapters.lora import Rank
from ktft.adapters.peft import expert_layers
from ktft.config import PROJECTIONS
from ktft.model.experts import experts_family

ROUTED = {f"mlp.experts.N.{projection}" for projection in PROJECTIONS}
SHARED = {f"mlp.shared_experts.{projection}" for projection in PROJECTIONS}
DENSE = {f"mlp.{projection}" for projection in PROJECTIONS}
DEEPSEEK_ATTENTION = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}


def attention(*names: str) -> set[str]:
    return {f"self_attn.{name}" for name in names}


def trained(output: Path) -> dict[str, bool]:
    """Module, with N for numbers, of each LoRA in a file -> whether training moved any B of it away from zero."""
    found: dict[str, bool] = {}
    for name, tensor in load_file(output / "adapter_model.safetensors").items():
        if "lora_B" in name:
            path = name.split(".layers.")[1].partition(".")[2].removesuffix(".lora_B.weight")
            module = re.sub(r"\.\d+\.", ".N.", path)
            found[module] = found.get(module, False) or bool(tensor.any())
    return found


# --- LoRA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "target", "expected"),
    [
        ("qwen3moe", "down_proj", {"mlp.experts.N.down_proj"}),
        ("dsv3", "down_proj", {"mlp.experts.N.down_proj", "mlp.shared_experts.down_proj", "mlp.down_proj"}),
        ("dsv3", "experts.down_proj", {"mlp.experts.N.down_proj"}),
        ("dsv3", "experts", ROUTED),
        ("dsv3", "shared_experts.up_proj,q_a_proj", {"mlp.shared_experts.up_proj"} | attention("q_a_proj")),
        ("dsv2", "q_proj,kv_b_proj", attention("q_proj", "kv_b_proj")),
        ("dsv3", r".*\.experts\.\d+\.(gate|up)_proj", ROUTED - {"mlp.experts.N.down_proj"}),
        ("dsv3", "all", ROUTED | SHARED | DENSE | attention(*DEEPSEEK_ATTENTION)),
        ("qwen2moe", "shared_expert_gate", {"mlp.shared_expert_gate"}),
    ],
)
def test_lora_target_reaches_what_it_names(
    train_yaml: TrainYaml,
    run_exp: RunExp,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    target: str,
    expected: set[str],
) -> None:
    """Through LLaMA-Factory: exactly that requires a gradient, is in the file, and was moved by training."""
    models: list[Any] = []
    original = ktft.train.trainer.check_trained  # type: ignore[attr-defined]
    monkeypatch.setattr(
        "ktft.train.trainer.check_trained", lambda model, *args: models.append(model) or original(model, *args)
    )
    step = {"save_strategy": "no", "per_device_train_batch_size": 8, "max_steps": 1}
    run_exp(train_yaml(family, lora_target=target, **step))
    assert trained(tmp_path / "out") == dict.fromkeys(expected, True)
    (model,) = models
    assert all(p.requires_grad == (".lora_" in name) for name, p in model.named_parameters())
    assert all(p.grad is None for name, p in model.named_parameters() if ".lora_" not in name)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE_FAMILIES])
def test_routers_train_whole_and_not_by_lora(tiny_checkpoint: Checkpoint, family: str) -> None:
    """No family's forward would use LoRA on its router; trained whole, every router gets a gradient."""
    model = stock.load(tiny_checkpoint(family))
    router = experts_family(model).router
    ids = torch.arange(3, 43).reshape(2, 20)
    with pytest.raises(ValueError, match=f"'{router}' matches the router .*train it whole with additional_target"):
        ktft.get_peft_model(model, lora_config(target_modules=[router]))
    places = {"gemma4": router, "nemotron": f"mixer.{router}", "llama4": f"feed_forward.{router}"}
    place = places.get(family, f"mlp.{router}")  # Gemma: beside its MLP
    routers = {name: m for name, m in model.named_modules() if name.endswith(place)}
    assert routers
    before = {name: {n: p.detach().clone() for n, p in m.named_parameters()} for name, m in routers.items()}
    whole = lora_config(target_modules=["experts"], modules_to_save=[place])
    adapted = ktft.get_peft_model(model, whole)
    adapted.train()(input_ids=ids, labels=ids).loss.backward()
    for name, parameters in before.items():
        wrapper = adapted.get_submodule(f"base_model.model.{name}")
        for parameter, values in parameters.items():
            trained_whole = wrapper.modules_to_save["default"].get_parameter(parameter)
            assert torch.equal(trained_whole, values)
            if "e_score_correction_bias" not in parameter:  # chooses experts, and has no gradient
                assert trained_whole.grad is not None and trained_whole.grad.any()
        assert not any(p.requires_grad for p in wrapper.original_module.parameters())
    wanted = {".lora_", ".modules_to_save."}
    assert all(any(w in n for w in wanted) == p.requires_grad for n, p in adapted.named_parameters())


# --- modules that are trained whole -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "target", "expected"),
    [
        ("qwen3moe", "gate,input_layernorm,model.norm", {"mlp.gate.weight", "input_layernorm.weight", "norm.weight"}),
        ("dsv3", "gate,embed_tokens,lm_head", {"mlp.gate.weight", "embed_tokens.weight", "lm_head.weight"}),
        ("dsv3", "shared_experts", {f"{name}.weight" for name in SHARED}),
    ],
)
def test_additional_target_is_trained_saved_and_loaded(
    train_yaml: TrainYaml, run_exp: RunExp, tmp_path: Path, family: str, target: str, expected: set[str]
) -> None:
    output, again = tmp_path / "out", tmp_path / "again"
    config = train_yaml(family, bf16=True, lora_target="experts,o_proj", additional_target=target)
    run_exp(config)
    checkpoint = Path(config["model_name_or_path"])
    base = read_all(checkpoint)
    saved = load_file(output / "adapter_model.safetensors")
    whole = {n.removeprefix("base_model.model."): t for n, t in saved.items() if "lora" not in n}
    learned = [name for name in whole if not name.endswith("e_score_correction_bias")]
    assert {re.sub(r"^model\.(layers\.\d+\.)?", "", name) for name in learned} == expected
    for name, tensor in whole.items():
        assert torch.equal(tensor.float(), base[name].float()) == name.endswith("e_score_correction_bias"), name

    fresh = load(checkpoint)
    plain = logits(fresh)
    loaded = ktft.load_adapter(fresh, output)
    assert not torch.equal(logits(loaded), plain)
    for name, tensor in whole.items():
        wrapper, _, leaf = name.rpartition(".")
        while wrapper and not hasattr(module := loaded.get_submodule(f"base_model.model.{wrapper}"), "modules_to_save"):
            wrapper, _, part = wrapper.rpartition(".")
            leaf = f"{part}.{leaf}"
        assert torch.equal(module.modules_to_save["default"].state_dict()[leaf], tensor)
    with loaded.disable_adapter():
        assert torch.equal(logits(loaded), plain)

    # going on from it starts from its values
    rest = {"additional_target": None, "adapter_name_or_path": str(output), "output_dir": str(again)}
    run_exp(config | rest | {"learning_rate": 0.0})
    second = load_file(again / "adapter_model.safetensors")
    assert second.keys() == saved.keys()
    assert all(torch.equal(second[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"additional_target": "experts"}, "'experts' matches model.layers.0.mlp.experts, which is routed experts"),
        ({"additional_target": "mlp"}, "matches model.layers.0.mlp, which holds routed experts"),
        ({"additional_target": "nothing"}, "'nothing' matches nothing in the model; name modules, such as gate"),
        ({"additional_target": "norm"}, "'norm' matches .*q_norm too.*or name q_norm as well"),
        (
            {"additional_target": "gate", "bf16": False},
            "trains modules in fp32 within a model of bfloat16; set bf16: true",
        ),
    ],
)
def test_refused_additional_targets(train_yaml: TrainYaml, run_exp: RunExp, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_exp(train_yaml("qwen3moe", lora_target="experts", **{"bf16": True} | options))


# --- ranks, scalings, dropout -----------------------------------------------------------------------------------------


def test_patterns_and_rslora_reach_each_projection(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Ranks and scalings by projection, by layer, and by routed or shared experts; the same after loading."""
    config = lora_config(
        target_modules=list(PROJECTIONS),
        rank_pattern={"down_proj": 2, r"layers\.2\.mlp\.experts\.\d+\.up_proj": 6, "shared_experts.up_proj": 3},
        alpha_pattern={"gate_proj": 5, r"layers\.1\.mlp\.experts\.\d+\.down_proj": 7},
        use_rslora=True,
    )
    model = ktft.get_peft_model(load(tiny_checkpoint("dsv3")), config)
    one, two = (layer.ranks["default"] for layer in expert_layers(model).values())
    assert one == {"gate_proj": Rank(4, 5), "up_proj": Rank(4, 8), "down_proj": Rank(2, 7)}
    assert two == {"gate_proj": Rank(4, 5), "up_proj": Rank(6, 8), "down_proj": Rank(2, 8)}
    layer = list(expert_layers(model).values())[1]
    lora = layer.active_lora()
    assert lora is not None
    assert {name: pair.scaling for name, pair in lora.pairs.items()} == pytest.approx(
        {"gate_proj": 5 / 4**0.5, "up_proj": 8 / 6**0.5, "down_proj": 8 / 2**0.5}
    )
    assert lora.pairs["up_proj"].b.shape == (8, 32, 6)
    shared = model.get_submodule("base_model.model.model.layers.2.mlp.shared_experts.up_proj")
    assert shared.lora_A["default"].weight.shape == (3, 64)
    model.save_pretrained(tmp_path)
    again = ktft.load_adapter(load(tiny_checkpoint("dsv3")), tmp_path)
    assert [layer.ranks["default"] for layer in expert_layers(again).values()] == [one, two]


def test_dropout_of_the_yaml_reaches_all_layers(train_yaml: TrainYaml, run_exp: RunExp, tmp_path: Path) -> None:
    def file(name: str, **options: Any) -> dict[str, Tensor]:
        options |= {"output_dir": str(tmp_path / name), "lora_target": "experts,q_proj", "save_strategy": "no"}
        run_exp(train_yaml("qwen3moe", **options))
        return load_file(tmp_path / name / "adapter_model.safetensors")

    without, one, two, other = (
        file("without"),
        file("one", lora_dropout=0.5),
        file("two", lora_dropout=0.5),
        file("other", lora_dropout=0.5, lora_alpha=16),
    )
    assert all(torch.equal(one[name], two[name]) for name in one)  # one seed, one result
    for part in (".experts.", ".q_proj."):
        names = [name for name in one if part in name and "lora_B" in name]
        assert any(not torch.equal(one[name], without[name]) for name in names)
        assert any(not torch.equal(one[name], other[name]) for name in names)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({"target_modules": ["experts"], "layers_to_transform": [1]}, {1}),
        ({"target_modules": ["experts"], "layers_to_transform": [0, 1], "layers_pattern": ["layers"]}, {0, 1}),
        ({"target_modules": [r".*layers\.(0|1)\.mlp\.experts.*"]}, {0, 1}),
        ({"target_modules": "all-linear", "exclude_modules": r".*layers\.0\.mlp\.experts.*"}, {1, 2}),
    ],
)
def test_experts_of_some_layers(
    tiny_checkpoint: Checkpoint, tmp_path: Path, options: dict[str, Any], layers: set[int]
) -> None:
    model = ktft.get_peft_model(load(tiny_checkpoint("qwen3moe")), lora_config(init_lora_weights=False, **options))
    model.save_pretrained(tmp_path)
    names = [name for name in load_file(tmp_path / "adapter_model.safetensors") if ".experts." in name]
    assert {int(name.split(".layers.")[1].split(".")[0]) for name in names} == layers
    again = ktft.load_adapter(load(tiny_checkpoint("qwen3moe")), tmp_path)
    assert torch.equal(logits(again), logits(model))


def test_layers_that_leave_nothing_are_named(tiny_checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=r"layers_to_transform=\[7\].* the layers are numbers 0 to 2"):
        ktft.get_peft_model(
            load(tiny_checkpoint("qwen3moe")), lora_config(target_modules=["experts"], layers_to_transform=[7])
        )
