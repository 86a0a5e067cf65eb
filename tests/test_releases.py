"""Each family in each source format it is released in: a tiny checkpoint of the real architecture, quantized and named
as its authors do, against stock transformers with the dequantized weights, and a training step against the reference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import relative
from given import Train, TrainYaml
from quantize import ALL_SCHEMES, is_expert, is_linear, quantize, read_all, separate, stack, write
from safetensors.torch import load_file
from stock import adapt, load, matrices, same_choices, text_loss
from tiny import FAMILIES, MORE_FAMILIES, write_checkpoint
from tiny_newer import without_the_like
from torch import Tensor, nn

from ktft import reference
from ktft.checkpoint.families import ROWS
from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora, LoraPair
from ktft.model.experts import KtftExperts, find_experts
from ktft.model.lacking import is_lacking

GATES = ["lm_head", "re:.*mlp.gate$"]
NOT_EXPERTS = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]


@dataclass(frozen=True)
class Release:
    """A family's checkpoints in one format.

    Attributes:
        family: of `tiny.py`.
        scheme: of `quantize.py`; `quantization` is added to its config.
        expert_format: what the experts are loaded into: the source's own format where ktft has it.
        chosen: which weights are quantized.
        separate: one tensor an expert, where unquantized checkpoints have them stacked.
        intermediate_size: by default blocks of 128 are ragged in both directions.
    """

    family: str
    scheme: str
    expert_format: str = "bf16"
    chosen: Callable[[str], bool] = is_linear
    quantization: dict[str, Any] = field(default_factory=dict)
    separate: bool = False
    intermediate_size: int = 160

    def __str__(self) -> str:
        return f"{self.family}-{self.scheme}{'-separate' if self.separate else ''}"


def block_fp8(family: str, *excluded: str, fmt: str = "e4m3", **options: Any) -> Release:
    written = {"activation_scheme": "dynamic", "fmt": fmt, "modules_to_not_convert": [*excluded]}
    return Release(family, "fp8", "fp8", quantization=written, **options)


RELEASES = [
    block_fp8("dsv3"),
    block_fp8("kimi_k2"),
    # Kimi-K2-Thinking: attention, shared experts and dense layers stay BF16
    Release("kimi_k2", "int4-32", "int4", is_expert, {"ignore": NOT_EXPERTS}),
    Release("glm4", "fp8-channel", "bf16", quantization={"ignore": GATES, "kv_cache_scheme": None}),
    block_fp8("glm5", "lm_head", "model.layers.*.self_attn.indexer.weights_proj"),
    block_fp8("minimax", "gate", "e_score_correction_bias", "lm_head", fmt="float8_e4m3fn"),
    Release("gpt_oss", "mxfp4", "mxfp4", is_expert),
    block_fp8("qwen3moe", "lm_head", "model.layers.0.mlp.gate"),
    Release("qwen3moe", "gptq", quantization={"lm_head": False, "true_sequential": True}),
    Release("qwen3moe", "awq", quantization={"modules_to_not_convert": ["gate"]}),
    Release("qwen2moe", "gptq", quantization={"model_file_base_name": "model"}),
    block_fp8("qwen3next", "lm_head", "model.layers.0.linear_attn.in_proj_ba", "model.layers.0.mlp.gate"),
    block_fp8("qwen3_5", "lm_head", "model.language_model.layers.0.mlp.gate", separate=True),
    # gate and up of one matrix keep their codes where no block holds rows of both
    block_fp8("qwen3vl", "lm_head", "model.language_model.layers.0.mlp.gate", intermediate_size=256),
    block_fp8("qwen3vl", "lm_head", "model.language_model.layers.0.mlp.gate", separate=True),
    Release("mixtral", "gptq"),
    Release("mixtral", "gptq-order"),
    Release("mixtral", "awq", quantization={"modules_to_not_convert": ["gate"]}),
    block_fp8("dsv32", "lm_head", "model.layers.*.self_attn.indexer.weights_proj"),
    Release("dsv4", "fp4-fp8", "mxfp4"),
    # All around the text model's experts stays BF16
    Release("kimi_k25", "int4-32", "int4", is_expert, {"ignore": [*NOT_EXPERTS, "re:vision_tower.*"]}),
    block_fp8("glm5_2", "lm_head", "model.layers.*.self_attn.indexer.weights_proj"),
    block_fp8("mimo", "lm_head"),
    # One tensor for the gates of all experts, one for their ups, one for their downs
    block_fp8("step", "lm_head", chosen=lambda name: is_linear(name) and "vision_model" not in name),
]
RELEASES = [release for release in RELEASES if release.family in FAMILIES | MORE_FAMILIES]

PLAIN_ONLY = {
    "DeepSeek-V2",
    "OLMoE",
    "Gemma-4",
    "Ernie-4.5-MoE",
    "Kimi-Linear",
    "GLM-4.7-Flash",
    "GLM-5.3-Flash",
    "MiniMax-M3",
    "Hunyuan-V3",
    "Hunyuan-V4",
    "Ling-3",
    "Mistral-4",
    "Mistral-Large-4",
    "Nemotron-3",
    "Trinity",
    "Llama-4",
    "LongCat-Flash",
    "Qwen3.8-Flash-Next",
}
"""Families of which BF16 releases alone are tested: `test_families.py`."""


def make(release: Release, folder: Path) -> tuple[Path, Path]:
    """The released checkpoint, and the dequantized one as stock transformers reads it."""
    size = release.intermediate_size
    sizes = {"hidden_size": 192, "intermediate_size": size, "moe_intermediate_size": size}
    source = write_checkpoint(release.family, folder / "source", **sizes)
    if release.separate:
        apart = separate(read_all(source), transposed=release.family == "qwen3vl")
        source = write(source, folder / "apart", apart, None)
    quantized, plain, tensors = quantize(source, folder, release.scheme, release.chosen)
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] |= release.quantization
    (quantized / "config.json").write_text(json.dumps(config))
    if release.family in ("qwen3vl", "qwen3_5"):  # stock 5.6 reads only what it writes
        stocks = stack(tensors) if release.separate else {n: t.mT if is_expert(n) else t for n, t in tensors.items()}
        plain = write(source, folder / "stock", stocks, None)
    return quantized, plain


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


class Watch:
    """What one layer's experts were called with and returned, and the gradients of both."""

    def __init__(self, module: KtftExperts) -> None:
        self.inputs: tuple[Tensor, ...] = ()
        module.register_forward_pre_hook(self.enter)
        module.register_forward_hook(self.leave)

    def enter(self, module: nn.Module, args: Any) -> Any:
        hidden, index, weights = args
        hidden = hidden.view_as(hidden)  # its gradient is then the experts' alone, without shared ones
        hidden.retain_grad()
        self.inputs = hidden, index, weights.detach().requires_grad_()
        return self.inputs

    def leave(self, module: nn.Module, args: Any, output: Tensor) -> None:
        output.retain_grad()
        self.output = output


def check_contract(watch: Watch, layer: Any, stock: Any) -> None:
    """Output within 0.5% and every gradient within 1% of the reference on the dequantized checkpoint's weights."""
    hidden, index, weights = watch.inputs
    own = [layer.stacked(kind, "default")[name] for name in PROJECTIONS for kind in ("lora_A", "lora_B")]
    copies = [leaf(parameter) for parameter in own]
    pairs = {name: LoraPair(a, b, 2.0) for name, a, b in zip(PROJECTIONS, copies[::2], copies[1::2], strict=True)}
    biases = None
    if hasattr(stock, "gate_up_proj_bias"):
        gate_up, down = stock.gate_up_proj_bias.detach(), stock.down_proj_bias.detach()
        biases = {"gate_proj": gate_up[:, ::2], "up_proj": gate_up[:, 1::2], "down_proj": down}
    x, w = leaf(hidden), leaf(weights)
    frozen = matrices(stock, stock.gate_up_proj.detach(), stock.down_proj.detach())
    swiglu = layer.base_layer.layer.swiglu
    expected = reference.moe(x, index, w, *frozen.values(), ExpertLora(pairs), swiglu, biases)
    assert relative(watch.output.detach(), expected.detach()) <= 0.005
    limit = 0.06 if swiglu.limit < 2 else 0.01  # rounding carries a few values over a clamp, and their gradients jump
    expected.backward(watch.output.grad)
    for number, (actual, wanted) in enumerate(zip((hidden, weights, *own), (x, w, *copies), strict=True)):
        assert relative(actual.grad, wanted.grad) <= limit, number


def full_unless_different(release: Release) -> Any:
    (case,) = without_the_like([release.family])
    return release if case == release.family else pytest.param(release, marks=pytest.mark.full)


def test_every_family_has_its_formats() -> None:
    released = {(FAMILIES | MORE_FAMILIES)[release.family][0].model_type for release in RELEASES}
    known = [row for row in ROWS if not all(map(is_lacking, row.model_types))]
    plain = {row.name for row in known if not released & set(row.model_types)}
    assert plain == PLAIN_ONLY & {row.name for row in known}, (
        "give the family a Release for each format it is released in, or name it in PLAIN_ONLY"
    )


def test_the_page_has_every_family() -> None:
    page = (Path(__file__).parents[1] / "docs/reference/formats.md").read_text()
    table = page.partition("| Family | Besides BF16 |")[2].partition("\n\n")[0]
    named = {name for cell in re.findall(r"^\| (.+?) \| .+\|$", table, re.MULTILINE) for name in cell.split(", ")}
    assert named == {row.name for row in ROWS}


@pytest.mark.parametrize("release", [*map(full_unless_different, RELEASES)], ids=str)
def test_released_checkpoint(tmp_path: Path, release: Release, caplog: pytest.LogCaptureFixture) -> None:
    quantized, plain = make(release, tmp_path)
    written = json.loads((quantized / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == ALL_SCHEMES[release.scheme][1]["quant_method"]
    stock, mine = load(plain, None), load(quantized, release.expert_format)
    assert "rounded once more" not in caplog.text
    names = list(find_experts(mine))
    same_choices(stock, mine, names)
    with torch.no_grad():
        expected, actual = text_loss(stock)[0], text_loss(mine)[0]
    assert relative(actual, expected) <= 0.02

    model = adapt(mine, b_std=0.05)
    watches = {name: Watch(mine.get_submodule(f"{name}.base_layer")) for name in names}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    _, loss = text_loss(model)
    loss.backward()
    for name, watch in watches.items():
        check_contract(watch, mine.get_submodule(name), stock.get_submodule(name))
    optimizer.step()
    assert not [name for name, p in trained.items() if torch.equal(p, before[name])]
    assert text_loss(model)[1] < loss


TRAINED = ("gpt_oss-mxfp4", "kimi_k2-int4-32", "dsv3-fp8", "qwen3moe-awq")


@pytest.mark.parametrize("release", [release for release in RELEASES if str(release) in TRAINED], ids=str)
def test_llamafactory_trains(tmp_path: Path, release: Release, train_yaml: TrainYaml, train: Train) -> None:
    """A released checkpoint as it is: LLaMA-Factory does not ask for the packages of its quantization method."""
    settings = {"expert_format": release.expert_format, "threads": 1}
    path = str(make(release, tmp_path)[0])
    log = train(train_yaml(model_name_or_path=path, kt_config=settings))
    assert f"layers x 8, {release.expert_format}" in log
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any(bool(t.any()) for name, t in tensors.items() if ".experts." in name and "lora_B" in name)
