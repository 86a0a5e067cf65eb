"""`from_pretrained` with `KtftConfig`: what it loads, and what it says about what it cannot take."""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapted
import pytest
import torch
from given import Checkpoint
from peft import LoraConfig, get_peft_model
from quantize import changed, read_all
from tiny import FAMILIES, write_checkpoint
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    NemotronHConfig,
    PreTrainedModel,
)

from ktft.checkpoint.families import FAMILIES as ROWS
from ktft.checkpoint.families import group_of
from ktft.config import PROJECTIONS, Settings
from ktft.model.experts import find_experts
from ktft.model.quantizer import KtftConfig, configure

IDS = torch.arange(24).reshape(2, 12)
EXPERT, NORM = "model.layers.1.mlp.experts.3.up_proj.weight", "model.norm.weight"


def load(path: Path, expert_format: str = "bf16", **kwargs: Any) -> PreTrainedModel:
    config = KtftConfig(expert_format=expert_format, threads=1)
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=config, **kwargs)


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS.to(model.device)).logits.cpu()


def test_lanes_that_need_a_gpu(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="placement is 'stream', but torch sees no GPU"):
        adapted.load(base, placement="stream")


@pytest.mark.parametrize("family", FAMILIES)
def test_no_expert_weight_is_a_tensor_of_the_model(tiny_checkpoint: Checkpoint, family: str) -> None:
    model = load(tiny_checkpoint(family), "int8")
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family))
    expected = {name for name in stock.state_dict() if ".experts." not in name}
    assert set(model.state_dict()) == expected
    assert {name for name, _ in model.named_parameters()} == expected & {name for name, _ in stock.named_parameters()}
    assert all(not buffer.numel() for name, buffer in model.named_buffers() if ".experts." in name)
    experts = find_experts(model)
    assert len(experts) == sum(name.endswith("gate_up_proj") for name in stock.state_dict())
    assert all(module.layer.packed_bytes >= 8 * 3 * 64 * 32 for module in experts.values())
    assert all(not list(module.parameters()) for module in experts.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_dequantized_experts_are_those_of_the_checkpoint(tiny_checkpoint: Checkpoint, family: str) -> None:
    stored = read_all(tiny_checkpoint(family))
    for expert_format, tolerance in (("bf16", 0.0), ("int8", 0.5 / 127)):
        for name, module in find_experts(load(tiny_checkpoint(family), expert_format)).items():
            for projection in PROJECTIONS:
                weight = stored[f"{name}.5.{projection}.weight"].float()
                error = (module.layer.dequantize(5, projection) - weight).abs()
                assert (error <= tolerance * weight.abs().amax(1, keepdim=True) + 1e-6).all()


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}, "auto"])
def test_device_maps(tiny_checkpoint: Checkpoint, device_map: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_checkpoint("dsv3")
    expected = logits(load(path))
    assert "Packing experts (bf16): 100%" in capsys.readouterr().err
    torch.testing.assert_close(logits(load(path, device_map=device_map)), expected)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_moves_and_casts(base: Path, device: str) -> None:
    model = load(base)
    expected = logits(model)
    torch.testing.assert_close(logits(model.to(device)), expected, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(logits(copy.deepcopy(model)), expected, atol=1e-3, rtol=1e-3)
    model.to(torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert logits(model).isfinite().all()


def test_one_config_loads_twice(tiny_checkpoint: Checkpoint) -> None:
    path = tiny_checkpoint("dsv2")
    config = AutoConfig.from_pretrained(path)
    configure(config, Settings(expert_format="int8", activation="recompute"))
    first, second = (AutoModelForCausalLM.from_pretrained(path, config=config) for _ in range(2))
    torch.testing.assert_close(logits(first), logits(second))
    assert first.config.quantization_config.settings == Settings(expert_format="int8", activation="recompute")
    assert {module.activation for module in find_experts(first).values()} == {"recompute"}
    configure(config, Settings())  # again, over ktft's own


def test_base_model_without_head(base: Path) -> None:
    model = AutoModel.from_pretrained(base, dtype=torch.float32, quantization_config=KtftConfig(expert_format="bf16"))
    stock = AutoModel.from_pretrained(base, dtype=torch.float32)
    config = AutoConfig.from_pretrained(base)
    configure(config, Settings())
    again = AutoModel.from_pretrained(base, dtype=torch.float32, config=config)
    assert {p.dtype for p in again.parameters()} == {torch.float32}, "transformers alone leaves renamed ones in bf16"
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).last_hidden_state, stock(IDS).last_hidden_state, atol=2e-2, rtol=2e-2)


def test_new_task_head_is_left_to_transformers(tiny_checkpoint: Checkpoint) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_checkpoint("dsv3"), num_labels=1, quantization_config=KtftConfig(threads=1)
    )
    assert len(find_experts(model)) == 2
    assert logits(model).shape == (2, 1)


def test_tied_embeddings(tmp_path: Path) -> None:
    model = load(write_checkpoint("qwen3moe", tmp_path, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_experts_from_another_checkpoint(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tiny_checkpoint("dsv3")

    def halve_experts(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: tensor / 2 for name, tensor in tensors.items() if ".experts." in name})

    other = changed(path, tmp_path / "other", halve_experts)
    model = adapted.load(path, expert_checkpoint=str(other))
    torch.testing.assert_close(logits(model), logits(load(other)))
    assert not torch.allclose(logits(model), logits(load(path)), atol=1e-2)


def test_bad_checkpoints(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = tiny_checkpoint("dsv3")
    changes: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
        "missing expert": (lambda t: t.pop(EXPERT), f"lacks expert tensors: {EXPERT};"),
        "shape": (
            lambda t: t.update({EXPERT: torch.zeros(32, 32, dtype=torch.bfloat16)}),
            f"{EXPERT} has shape (32, 32), the model's config needs (32, 64)",
        ),
        "dtype": (
            lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)}),
            f"{EXPERT} is F8_E4M3; weights are read from BF16, F16, F32",
        ),
        "norm shape": (
            lambda t: t.update({NORM: torch.ones(32)}),
            f"{NORM} has shape (32,), the model's config needs (64,)",
        ),
        "norm dtype": (lambda t: t.update({NORM: t[NORM].char()}), f"{NORM} is I8; weights are read from"),
        "NaN": (lambda t: t[EXPERT][3].fill_(float("nan")), f"{EXPERT}: "),
        "infinity": (lambda t: t[EXPERT][0].fill_(float("inf")), f"{EXPERT}: "),
        "bias": (
            lambda t: t.update({EXPERT.replace("weight", "bias"): torch.zeros(32)}),
            "holds expert tensors that this model has no place for: " + EXPERT[:-6] + "bias",
        ),
        "more experts": (lambda t: t.update({EXPERT.replace("3", "8"): t[EXPERT].clone()}), "has no place for"),
        "missing norm": (lambda t: t.pop(NORM), f"lacks tensors that the model needs: {NORM};"),
        "missing head": (lambda t: t.pop("lm_head.weight"), "lacks tensors that the model needs: lm_head.weight;"),
        "left over": (
            lambda t: t.update({"model.layers.1.self_attn.extra.weight": torch.zeros(1)}),
            "holds tensors that the model has no place for: model.layers.1.self_attn.extra.weight;",
        ),
    }
    for name, (change, message) in changes.items():
        path = changed(source, tmp_path / name.replace(" ", "_"), change)
        with pytest.raises(ValueError) as error:
            load(path)
        assert message in str(error.value), name
        assert "\n" not in str(error.value), name


def test_bad_shards(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint("dsv3"), path)
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{shard.name} is truncated: tensor"):
        load(path)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"shard .*{shard.name} is missing"):
        load(path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; ktft computes the experts of Qwen3-MoE with 'silu' and"),
        ({"moe_intermediate_size": 48}, "48"),
        (
            {"mlp_only_layers": [0, 1, 2]},
            "Qwen3MoeForCausalLM (model_type 'qwen3_moe') has no Qwen3MoeExperts to replace",
        ),
    ],
)
def test_models_the_kernels_cannot_take(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load(write_checkpoint("qwen3moe", tmp_path, **overrides))


def test_unknown_family_does_not_fall_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ROWS, "nemotron_h")  # its experts without a gate need the row
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    mamba = {"mamba_num_heads": 2, "mamba_head_dim": 32}
    config = NemotronHConfig(**sizes, **mamba, layers_block_type=["moe", "attention"], n_routed_experts=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type 'nemotron_h' has no row in .*no gate projection"):
        load(tmp_path)


def test_bad_settings(base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown key 'expert_fmt'; the nearest valid key is 'expert_format'"):
        KtftConfig(expert_fmt="int8")
    with pytest.raises(ValueError, match="expert_format is 'fp4'; supported: bf16, int8"):
        KtftConfig(expert_format="fp4")
    with pytest.raises(ValueError, match="device_map puts modules on disk"):
        load(base, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun does, but nobody joins
    with pytest.raises(RuntimeError, match="has not joined the other 1 processes; make .*TrainingArguments"):
        load(base)(input_ids=torch.ones(1, 3, dtype=torch.long))


def test_base_weights_are_not_saved(base: Path, tmp_path: Path, caplog: Any) -> None:
    with pytest.raises(ValueError, match="quantized with ktft and is not serializable"):
        load(base).save_pretrained(tmp_path)
    assert "save the adapter" in caplog.text


def test_expert_lora_that_peft_would_drop(tiny_checkpoint: Checkpoint) -> None:
    model = get_peft_model(load(tiny_checkpoint("dsv3")), LoraConfig(target_modules=["q_a_proj"]))
    key = f"base_model.model.{EXPERT.removesuffix('weight')}lora_A.default.weight"
    with pytest.raises(ValueError, match=r"load it with ktft\.load_adapter"):
        model.load_state_dict({key: torch.zeros(4, 64)}, strict=False)


def test_tensor_parallel_plan_leaves_experts_alone(base: Path) -> None:
    model = load(base)
    assert model.tp_plan and not [key for key in model.tp_plan if ".experts" in key]
    assert [key for key in type(model.config)().base_model_tp_plan if ".experts" in key], (
        "the class's own plan is unchanged"
    )


def test_groups() -> None:
    row, prefix = ROWS["deepseek_v3"], "base_model.model.model.layers.1."
    names = {
        "self_attn.q_a_proj.lora_A.default.weight": "attention",
        "mlp.shared_experts.up_proj.lora_B.default.weight": "shared experts",
        "mlp.experts.lora_A.default.gate_proj": "routed experts",
        "mlp.experts.3.gate_proj.lora_A.weight": "routed experts",
        "mlp.gate.weight": "router",
        "mlp.gate_proj.lora_A.default.weight": "other",
        "input_layernorm.weight": "other",
    }
    assert {name: group_of(prefix + name, row) for name in names} == names
