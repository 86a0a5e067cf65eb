"""Every row of the table of families: a tiny checkpoint of the real architecture, named and laid out as released, gives
stock transformers' logits and gradients, trains, and has an adapter that loads again.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import relative
from given import Checkpoint, Train, TrainYaml
from quantize import quantize, read_all, separate, write
from runs import arguments
from safetensors.torch import load_file
from stock import IDS, adapt, load, matrices, same_choices, stacked, text_loss
from tiny import FAMILIES, MORE_FAMILIES, write_checkpoint
from tiny_newer import known, without_the_like
from torch import Tensor, nn
from transformers import (
    AriaTextConfig,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GraniteMoeConfig,
    LlamaConfig,
    MixtralConfig,
    NemotronHConfig,
    PhimoeConfig,
    PreTrainedConfig,
    SolarOpenConfig,
    Trainer,
    modeling_utils,
)
from transformers.core_model_loading import WeightRenaming
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

import ktft
from ktft.checkpoint.families import FAMILIES as ROWS
from ktft.checkpoint.families import ROWS as TABLE
from ktft.checkpoint.families import group_of
from ktft.checkpoint.layouts import STACKED, Layout
from ktft.config import PROJECTIONS
from ktft.model import regroupings
from ktft.model.computed import activation_of
from ktft.model.experts import expert_modules, experts_family, find_experts
from ktft.model.generic import family_of
from ktft.model.lacking import is_lacking
from ktft.swiglu import GELU_TANH, SILU, Swiglu
from ktft.versions import FACTORY, NEWEST

ALL = [*FAMILIES, *MORE_FAMILIES]
EVERY = without_the_like(ALL)
SCALING = 2.0


def test_every_row_is_tested() -> None:
    assert len(ALL) == len(set(ALL))
    tested = {own.get("model_type", config.model_type) for config, own in (FAMILIES | MORE_FAMILIES).values()}
    known = {
        family.name: tested & set(family.model_types)
        for family in TABLE
        if not all(map(is_lacking, family.model_types))
    }
    assert all(known.values()), known


def test_a_family_that_transformers_lacks_is_refused_in_a_line() -> None:
    newest = len(NEWEST.misfits()) < len(FACTORY.misfits())
    for row in TABLE:
        for model_type in row.model_types:
            assert is_lacking(model_type) == (row.newest_only and not newest), model_type
            if is_lacking(model_type):
                with pytest.raises(
                    ValueError, match=f"has no {row.name} .*without LLaMA-Factory: pip install"
                ) as error:
                    AutoConfig.for_model(model_type)
                assert "\n" not in str(error.value)


def assert_same_logits(stock: torch.nn.Module, mine: torch.nn.Module, limit: float = 0.02) -> None:
    with torch.no_grad():
        expected, actual = text_loss(stock)[0], text_loss(mine)[0]
    assert relative(actual, expected) <= limit


@pytest.mark.parametrize("family", EVERY)
def test_logits_and_gradients_are_those_of_stock_transformers(tiny_checkpoint: Checkpoint, family: str) -> None:
    """LoRA with B = 0 leaves stock's logits. Otherwise stock has it merged: dA = s Bᵀ dW, dB = s dW Aᵀ."""
    path = tiny_checkpoint(family)
    stock, mine = load(path, None), load(path)
    names = list(find_experts(mine))
    assert names
    same_choices(stock, mine, names)
    assert_same_logits(stock, mine, 0.005 if family in FAMILIES else 0.02)

    adapted = adapt(mine, ["experts"], b_std=0.05)
    lora = {name: adapted.base_model.model.get_submodule(name) for name in names}
    with torch.no_grad():
        for name, layer in lora.items():
            module = stock.get_submodule(name)
            for projection, weight in matrices(module, *stacked(module)).items():
                a, b = (layer.stacked(kind, "default")[projection] for kind in ("lora_A", "lora_B"))
                weight += SCALING * b @ a
    # Where values are clamped, rounding carries a few over the limit, and their gradients jump
    limit = 0.06 if min(each.layer.swiglu.limit for each in find_experts(mine).values()) < 2 else 0.02
    (expected, loss), (actual, own_loss) = text_loss(stock), text_loss(adapted)
    assert relative(actual, expected) <= 0.02
    loss.backward()
    own_loss.backward()
    for name, layer in lora.items():
        module = stock.get_submodule(name)
        for projection, grad in matrices(module, *(parameter.grad for parameter in stacked(module))).items():
            a, b = (layer.stacked(kind, "default")[projection] for kind in ("lora_A", "lora_B"))
            for mine_grad, stock_grad in ((a.grad, SCALING * b.mT @ grad), (b.grad, SCALING * grad @ a.mT)):
                assert relative(mine_grad, stock_grad) <= limit, (name, projection)


@pytest.mark.full
@pytest.mark.parametrize("family", known())
def test_logits_with_a_gpu(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """What a GPU changes around the experts, such as the order of shared ones, suits the model's code."""
    monkeypatch.setenv("KTFT_EMULATE_GPU", "1")
    stock, mine = load(tiny_checkpoint(family), None), load(tiny_checkpoint(family))
    same_choices(stock, mine, list(find_experts(mine)))
    assert_same_logits(stock, mine)


@pytest.mark.parametrize("family", EVERY)
def test_trains_and_its_adapter_loads_again(tiny_checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """A step of transformers' Trainer on all linear layers: every one of them learns, the routers stay out."""
    model = adapt(load(tiny_checkpoint(family), "int8"), b_std=0.02)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    row = experts_family(model)
    groups = {group_of(name, row) for name in before}
    assert {"attention", "routed experts"} <= groups and "router" not in groups
    rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
    options = {"max_steps": 1, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_strategy": "no"}
    Trainer(model, arguments(tmp_path, **options), train_dataset=rows).train()
    idle = [name for name, p in model.named_parameters() if name in before and torch.equal(p, before[name])]
    assert not idle
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors")
    layer = next(iter(find_experts(model).values())).layer
    for projection in PROJECTIONS:
        name = f"base_model.model.{layer.name}.7.{projection}.lora_A.weight"
        assert (name in names) == (projection in layer.projections)
    again = ktft.load_adapter(load(tiny_checkpoint(family), "int8"), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(text_loss(again)[0], text_loss(model.eval())[0])


@pytest.mark.full
@pytest.mark.parametrize("family", known())
def test_resumes_exactly(tiny_checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    def losses(resume: str | None = None) -> list[float]:
        model = adapt(load(tiny_checkpoint(family), "int8"), b_std=0.02)
        options = {"max_steps": 3, "save_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
        trainer = Trainer(model, arguments(tmp_path, **options), train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    rows = [{"input_ids": ids, "labels": ids} for ids in IDS]
    whole = losses()
    assert len(whole) == 3 and losses(str(tmp_path / "checkpoint-2")) == whole


@pytest.mark.parametrize("family", ["qwen3vl", "qwen3_5", "qwen3_5_text"])
def test_other_layouts_of_the_same_weights(tiny_checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Experts as save_pretrained writes them, and one tensor an expert: the same model."""
    path = tiny_checkpoint(family)
    expected = {name: [e.layer.dequantize(7, p) for p in PROJECTIONS] for name, e in find_experts(load(path)).items()}
    stock = load(path, None)
    stock.save_pretrained(tmp_path / "saved")
    tensors = separate(load_file(tmp_path / "saved" / "model.safetensors"), transposed=False)
    for other in (tmp_path / "saved", write(path, tmp_path / "separate", tensors, None)):
        for name, module in find_experts(load(other)).items():
            for projection, weight in zip(PROJECTIONS, expected[name], strict=True):
                assert torch.equal(module.layer.dequantize(7, projection), weight)


@pytest.mark.parametrize("scheme", ["plain", "fp8"])
def test_renamings_meant_for_another_model_are_undone(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """transformers 5.4 and 5.5 have one for the text model of Qwen3.5 on the whole model."""
    path = base if scheme == "plain" else quantize(base, tmp_path, scheme)[0]
    expected = load(path)
    original = regroupings.get_model_conversion_mapping

    def with_another(*args: Any, **kwargs: Any) -> list[Any]:
        return [WeightRenaming("^model.layers.", "layers_of_another."), *original(*args, **kwargs)]

    for module in (regroupings, modeling_utils):
        monkeypatch.setattr(module, "get_model_conversion_mapping", with_another)
    assert_same_logits(expected, load(path), limit=0)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    path = write_checkpoint("glm4", tmp_path / "glm4", num_nextn_predict_layers=1)
    extra = {f"model.layers.3.{n}": torch.ones(2, 2) for n in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")}
    more = write(path, tmp_path / "more", read_all(path) | extra, None)
    assert len(find_experts(load(more))) == 2


def test_bad_experts_are_named(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = tiny_checkpoint("gpt_oss")
    tensors, stem = read_all(source), "model.layers.1.mlp.experts."
    changes: dict[str, tuple[dict[str, Tensor | None], str]] = {
        "no bias": ({f"{stem}down_proj_bias": None}, f"lacks expert tensors: {stem}down_proj_bias"),
        "bias": ({f"{stem}gate_up_proj_bias": torch.zeros(8, 96)}, "needs (8, 192)"),
        "shape": ({f"{stem}gate_up_proj": torch.zeros(8, 192, 64)}, "needs (8, 64, 192)"),
        "left over": ({f"{stem}up_proj": torch.zeros(8, 64, 96)}, f"no place for: {stem}up"),
        "NaN": ({f"{stem}down_proj_bias": torch.full((8, 64), float("nan"))}, f"{stem}down_proj_bias: it holds NaN"),
    }
    for name, (change, message) in changes.items():
        changed = {key: value for key, value in (tensors | change).items() if value is not None}
        with pytest.raises(ValueError) as error:
            load(write(source, tmp_path / name, changed, None))
        assert message in str(error.value), name


def test_limit_of_the_config_counts(tmp_path: Path) -> None:
    model = load(write_checkpoint("gpt_oss", tmp_path, swiglu_limit=5.0))
    swiglu = next(iter(find_experts(model).values())).layer.swiglu
    assert (swiglu.alpha, swiglu.limit, swiglu.shift) == (1.702, 5.0, 1.0)


def test_lora_that_would_get_no_gradient_is_refused(tiny_checkpoint: Checkpoint) -> None:
    message = r"matches the module .*self_attn\.indexer\.wk, whose forward would not use LoRA"
    with pytest.raises(ValueError, match=message):
        adapt(load(tiny_checkpoint("glm5")), ["wk"])
    with pytest.raises(ValueError, match=r"matches the router .*mlp\.router"):
        adapt(load(tiny_checkpoint("gpt_oss")), ["router"])


newest = pytest.mark.skipif("kimi_linear" not in ALL, reason="transformers lacks these families")


@newest
def test_parts_of_what_transformers_joins_are_checked(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = tiny_checkpoint("kimi_linear")
    tensors, name = read_all(source), "model.layers.0.self_attn.k_conv1d.weight"
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    changes: dict[str, tuple[Tensor | None, Any, str]] = {
        "missing": (None, None, r"lacks tensors.*k_conv1d\.weight for model\.layers\.0\.self_attn\.conv1d\.weight"),
        "shape": (torch.zeros(64, 1, 3), None, "have 704 elements, model.layers.0.self_attn.conv1d.weight 768"),
        "dtype": (
            tensors[name].to(torch.float8_e4m3fn),
            fp8,
            "is F8_E4M3; transformers makes model.layers.0.self_attn",
        ),
        "NaN": (tensors[name] * float("nan"), None, "holds NaN or Inf"),
    }
    for case, (tensor, quantization, message) in changes.items():
        changed = {key: value for key, value in (tensors | {name: tensor}).items() if value is not None}
        with pytest.raises(ValueError, match=message):
            load(write(source, tmp_path / case, changed, quantization))


@newest
def test_layers_that_an_indexer_has_too_are_named_with_their_parent(tiny_checkpoint: Checkpoint) -> None:
    model = load(tiny_checkpoint("minimax_m3"))
    with pytest.raises(ValueError, match=r"indexer\.k_proj too, .* name self_attn\.k_proj instead"):
        adapt(model, ["k_proj", "v_proj"])
    assert not [
        name for name, _ in adapt(model, ["self_attn.k_proj"]).named_parameters() if ".indexer.k_proj.lora" in name
    ]


# --- families without a row -------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.08,
}
OLDER = ("phimoe", "solar_open")
"""Those whose experts transformers calls in its usual way in the older stack too."""
GRANITE = ("input_linear.weight", "input_linear.weight", "output_linear.weight")
GENERIC: dict[str, tuple[PreTrainedConfig, Layout]] = {
    "phimoe": (
        PhimoeConfig(**SMALL, num_local_experts=8),
        Layout("model.layers.{layer}.block_sparse_moe.experts.{expert}.{projection}", names=("w1", "w3", "w2")),
    ),
    "granitemoe": (
        GraniteMoeConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2),
        Layout("model.layers.{layer}.block_sparse_moe.{projection}", names=GRANITE),
    ),
    "aria_text": (
        AriaTextConfig(**SMALL, moe_num_experts=8, moe_topk=2),
        Layout(
            "model.layers.{layer}.mlp.experts.{projection}", ("fc1.weight", "fc1.weight", "fc2.weight"), False, True
        ),
    ),
    "solar_open": (
        SolarOpenConfig(**SMALL, n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, head_dim=16),
        Layout("model.layers.{layer}.mlp.experts.{expert}.{projection}"),
    ),
}


@pytest.mark.parametrize("model_type", [name for name in GENERIC if name in OLDER or "kimi_linear" in ALL])
def test_family_without_a_row(tmp_path: Path, model_type: str) -> None:
    config, layout = GENERIC[model_type]
    assert model_type not in ROWS
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    stock, mine = load(tmp_path, None), load(tmp_path)
    assert experts_family(mine).layouts[0] == layout
    same_choices(stock, mine, list(find_experts(mine)))
    assert_same_logits(stock, mine)
    adapted = adapt(mine, b_std=0.02)
    text_loss(adapted)[1].backward()
    assert all(p.grad is not None and p.grad.any() for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (
            NemotronHConfig(hidden_size=64),
            "no gate projection",
        ),
        (PhimoeConfig(**SMALL, hidden_act="gelu"), "compute something else .* the activation GELUActivation"),
        (PhimoeConfig(**SMALL, hidden_act="relu"), "compute something else .* the activation ReLU"),
        (AutoConfig.for_model("jetmoe"), "no module of JetMoeForCausalLM holds .* train it without ktft"),
        (LlamaConfig(**SMALL), "no module of LlamaForCausalLM holds its routed experts"),
    ],
)
def test_other_experts_are_refused(monkeypatch: pytest.MonkeyPatch, config: PreTrainedConfig, what: str) -> None:
    monkeypatch.delitem(ROWS, "nemotron_h")  # its experts without a gate need the row
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"model_type '{config.model_type}' has no row in .*{what}") as error:
        family_of(model)
    assert "\n" not in str(error.value)


@newest
def test_layouts_and_norms_of_the_newest_transformers() -> None:
    def on_meta(model_type: str) -> Any:
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type))

    stem = "model.language_model.layers.{layer}.mlp.experts.{expert}.{projection}"
    assert Layout(stem) in family_of(on_meta("glm4v_moe")).layouts
    with pytest.raises(ValueError, match="a norm after each expert"):
        family_of(on_meta("muse_spark"))
    with pytest.raises(
        ValueError, match="something else .* the activation Inkling2SoftcappedSwiGLU; a gating function"
    ):
        family_of(on_meta("inkling2"))


class OtherExperts(MixtralExperts):
    """Stock experts with one change, which no setting and no name tells."""

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.change(self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for token, slot in itertools.product(*map(range, top_k_index.shape)):
            expert, x = top_k_index[token, slot], hidden_states[token]
            inner = self._apply_gate(self.gate_up_proj[expert] @ x)
            out[token] += top_k_weights[token, slot] * (self.down_proj[expert] @ inner)
        return out


@pytest.mark.parametrize(
    ("limit", "act", "change", "expected"),
    [
        (math.inf, "silu", lambda h: h, SILU),
        (math.inf, "gelu_pytorch_tanh", lambda h: h, GELU_TANH),
        (7.0, "silu", lambda h: h, Swiglu(limit=7.0)),
        (7.0, "gelu_pytorch_tanh", lambda h: h, None),
        (math.inf, "silu", lambda h: 1.001 * h, None),
        (math.inf, "gelu", lambda h: h, None),
        (math.inf, "relu", lambda h: h, None),
    ],
)
def test_what_experts_compute_is_measured(limit: float, act: str, change: Any, expected: Swiglu | None) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 8}
    with torch.device("meta"):
        experts = OtherExperts(MixtralConfig(**sizes, hidden_act=act))
        experts.limit, experts.change = limit, change
        assert activation_of(experts, transposed=False) == expected


def test_settings_that_a_family_without_a_row_does_not_use(tmp_path: Path) -> None:
    config, _ = GENERIC["phimoe"]
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"swiglu_limit": 0.01}))
    assert next(iter(find_experts(load(tmp_path)).values())).layer.swiglu == SILU


def test_two_lists_of_layers_are_refused() -> None:
    with torch.device("meta"):
        two = nn.ModuleDict({name: AutoModelForCausalLM.from_config(GENERIC["phimoe"][0]) for name in "ab"})
    two.config = two["a"].config
    with pytest.raises(ValueError, match=r"in two lists of layers, a\.model\.layers\.0\..* and b\.model"):
        expert_modules(two, family_of(two["a"]))


def test_converted_experts_are_refused() -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("ernie4_5_vl_moe"))
    with pytest.raises(ValueError, match="converted on loading by ErnieFuseAndSplitTextVisionExperts; add a row"):
        family_of(model)


def test_names_of_other_tensors_are_not_experts() -> None:
    row = ROWS["mixtral"]
    is_expert = row.expert_pattern()
    assert is_expert.match("model.layers.3.block_sparse_moe.experts.7.w1.weight_scale_inv")
    assert not is_expert.match("model.layers.3.block_sparse_moe.gate.weight")
    assert not ROWS["qwen2_moe"].expert_pattern().match("model.layers.0.mlp.shared_experts.up_proj.weight")
    assert STACKED.pattern().match("model.layers.11.mlp.experts.gate_up_proj_blocks")
    assert not STACKED.pattern().match("model.layers.11.mlp.experts.gate_up_projection")


# --- a user's entry point ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral", "qwen3vl"])
def test_llamafactory_trains(train_yaml: TrainYaml, train: Train, tmp_path: Path, family: str) -> None:
    log = train(train_yaml(family))
    assert "routed experts: 3 layers x 8, bf16" in log
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    trained = [name.split(".")[-3] for name, t in tensors.items() if "lora_B" in name and t.any()]
    assert {*PROJECTIONS, "q_proj", "o_proj"} <= set(trained)
    assert sum(".experts." in name for name in tensors) == 3 * 8 * 3 * 2
    assert not [name for name in tensors if ".visual." in name or "router" in name or ".gate." in name]
