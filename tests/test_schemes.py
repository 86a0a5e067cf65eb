"""Quantized checkpoints: each source format into ktft's, kept codes, stacked layouts, and what is refused."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import distance, load, logits
from quantize import ALL_SCHEMES, SCHEMES, changed, quantize, read_all, write
from tiny import write_checkpoint
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import ktft
from ktft.checkpoint.schemes import PLAIN_SCHEME, DeepSeekFp8, Fp8, PackedInt4, Scheme, scheme_of
from ktft.config import PROJECTIONS
from ktft.model.experts import find_experts

# Blocks of 128 are ragged in both directions, in experts and in attention. One MoE layer: a router further up would
# see rounded inputs, and near ties would choose other experts.
SIZES = {"hidden_size": 192, "moe_intermediate_size": 160, "kv_lora_rank": 32, "num_hidden_layers": 2}
EXPERTS = "model.layers.1.mlp.experts"
KEPT = {
    **dict.fromkeys(("fp8", "fp8-bf16-scales", "fp8-block", "fp8-tensor"), "fp8"),
    **dict.fromkeys(("int4-32", "int4-channel"), "int4"),
}
"""Source -> the expert format that holds it as it is."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("dsv3", tmp_path_factory.mktemp("plain"), **SIZES)


@pytest.fixture(scope="module")
def fp8_checkpoint(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantize(plain, tmp_path_factory.mktemp("fp8"), "fp8")[0]


def each_weight(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for name, module in find_experts(model).items():
        for expert in range(module.num_experts):
            for projection in PROJECTIONS:
                yield f"{name}.{expert}.{projection}.weight", module.layer.dequantize(expert, projection)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_those_of_the_dequantized_checkpoint(plain: Path, tmp_path: Path, scheme: str) -> None:
    quantized, dequantized, weights = quantize(plain, tmp_path, scheme)
    expected = logits(AutoModelForCausalLM.from_pretrained(dequantized, dtype=torch.float32))
    formats = {"bf16": 2e-2, "int8": 2e-2} | ({KEPT[scheme]: 2e-2} if scheme in KEPT else {})
    for expert_format, tolerance in formats.items():
        model = load(quantized, expert_format=expert_format)
        assert distance(logits(model), expected) < tolerance, expert_format
        for name, weight in each_weight(model):
            if expert_format == "int8":
                assert ((weight - weights[name]).abs() <= weights[name].abs().amax(1, keepdim=True) * 0.502 / 127).all()
            else:
                assert torch.equal(weight.bfloat16(), weights[name].bfloat16()), (name, expert_format)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, weights[name]), name


def test_weights_around_the_experts_in_bf16(plain: Path, tmp_path: Path) -> None:
    quantized, _, weights = quantize(plain, tmp_path, "fp8")
    model = AutoModelForCausalLM.from_pretrained(quantized, quantization_config=ktft.KtftConfig(threads=1))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, weights[name].bfloat16()), name


def test_layers_for_multi_token_prediction_are_ignored(plain: Path, tmp_path: Path) -> None:
    quantized, _, _ = quantize(plain, tmp_path / "a", "fp8")
    tensors = read_all(quantized)
    extra = {name.replace("layers.1.", "layers.61."): t for name, t in tensors.items() if "layers.1." in name}
    path = write(quantized, tmp_path / "mtp", tensors | extra, SCHEMES["fp8"][1])
    assert torch.equal(logits(load(path)), logits(load(quantized)))


def test_rounding_once_more_is_said_once(plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    quantized, _, _ = quantize(plain, tmp_path, "int4-fp16-scales")
    with caplog.at_level(logging.WARNING, logger="ktft"):
        load(quantized, expert_format="int4")
        load(quantized, expert_format="int8")
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("ktft")]
    assert len(messages) == 1 and "int4 weights are rounded once more" in messages[0]


# --- config.json ------------------------------------------------------------------------------------------------------


def test_every_scheme_is_tested() -> None:
    def below(scheme: type[Scheme]) -> set[type[Scheme]]:
        return {scheme}.union(*(below(each) for each in scheme.__subclasses__()))

    read = [scheme_of({"quantization_config": config}, "c") for _, config in ALL_SCHEMES.values()]
    tested = {type(each) for scheme in read for each in (scheme, *scheme.beside)}
    known = {each for each in below(Scheme) if each.container == "safetensors"}
    assert tested | {Scheme} == known, "add it to tests/quantize.py"


def test_schemes_by_configuration() -> None:
    kimi, fp8 = SCHEMES["int4-32"][1], {"quant_method": "fp8", "weight_block_size": [64, 32]}
    assert scheme_of({}, "c") is PLAIN_SCHEME
    assert scheme_of({"text_config": {"quantization_config": kimi}}, "c") == PackedInt4(32)
    assert scheme_of({"quantization_config": fp8}, "c") == Fp8((64, 32))
    assert scheme_of({"expert_dtype": "fp4", "quantization_config": fp8}, "c") == DeepSeekFp8((64, 32))


def compressed_int4(**weights: Any) -> dict[str, Any]:
    config = copy.deepcopy(SCHEMES["int4-32"][1])
    config["config_groups"]["group_0"]["weights"] |= weights
    return config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; ktft reads fp8, compressed-tensors, mxfp4"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; ktft reads e4m3"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size is [128]; it must be two positive"),
        ({"quant_method": "gptq", "bits": 8}, "bits is 8; ktft reads 4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48}, "group_size is 48; ktft reads multiples of 32"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'; ktft reads gemm"),
        ({"quant_method": "compressed-tensors"}, "it has no config_groups"),
        (compressed_int4(num_bits=8), "weights: num_bits is 8; ktft reads 4"),
        (compressed_int4(symmetric=False), "symmetric is False; ktft reads True"),
        (compressed_int4(actorder="group"), "actorder is 'group'; ktft reads null"),
        (compressed_int4(group_size=20), "group_size is 20"),
        (compressed_int4(strategy="token"), "strategy is 'token'; ktft reads group, channel"),
        ("fp8", "quantization_config is 'fp8'; it must be a mapping"),
    ],
)
def test_configurations_that_cannot_be_read(change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"some/config.json: .*{re.escape(message)}"):
        scheme_of({"quantization_config": change}, "some/config.json")


# --- bad checkpoints --------------------------------------------------------------------------------------------------


CODES = f"{EXPERTS}.3.up_proj.weight"
SCALE = f"{CODES}_scale_inv"
G_IDX = f"{EXPERTS}.3.up_proj.g_idx"
ATTENTION = "model.layers.0.self_attn.o_proj.weight"
OUTPUT_SCALE = f"{ATTENTION}_scale_inv"
BAD: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "no scale": (lambda t: t.pop(SCALE), f"lacks expert tensors: {SCALE}"),
    "no codes": (lambda t: t.pop(CODES), f"lacks expert tensors: {CODES}"),
    "scale left over": (
        lambda t: t.update({CODES: t[CODES].bfloat16()}),
        f"holds expert tensors that this model has no place for: {SCALE}",
    ),
    "scale dtype": (
        lambda t: t.update({SCALE: t[SCALE].int()}),
        f"{SCALE} is I32; fp8 has it in F32, BF16, F16, F8_E8M0",
    ),
    "scale shape": (
        lambda t: t.update({SCALE: torch.ones(1, 2)}),
        f"{SCALE} has shape (1, 2), the model's config needs (2, 2)",
    ),
    "NaN scale": (lambda t: t[SCALE].fill_(torch.nan), f"{CODES}: its scales hold NaN or Inf"),
    "negative scale": (lambda t: t[SCALE].neg_(), f"{CODES}: its scales hold a negative number"),
    "NaN codes": (
        lambda t: t[CODES].view(torch.uint8)[5].fill_(0x7F),
        f"{CODES}: it holds NaN or Inf, for instance at [5, 0]",
    ),
    "codes dtype": (
        lambda t: t.update({CODES: t[CODES].float().to(torch.float8_e5m2)}),
        f"{CODES} is F8_E5M2; weights are read from F8_E4M3, BF16, F16, F32 in a checkpoint whose config.json names",
    ),
    "attention without scale": (lambda t: t.pop(OUTPUT_SCALE), f"that the model needs: {OUTPUT_SCALE}"),
    "attention scale shape": (
        lambda t: t.update({OUTPUT_SCALE: torch.ones(1, 1)}),
        f"{OUTPUT_SCALE} has shape (1, 1), the model's config needs (2, 1)",
    ),
    "attention NaN scale": (lambda t: t[OUTPUT_SCALE].fill_(torch.inf), f"{ATTENTION}: it holds NaN or Inf"),
    "attention negative scale": (lambda t: t[OUTPUT_SCALE].neg_(), f"{ATTENTION}: its scales hold a negative"),
    "norm NaN": (lambda t: t["model.norm.weight"].fill_(torch.nan), "model.norm.weight holds NaN or Inf"),
    "left over": (
        lambda t: t.update({f"{ATTENTION}_zero_point": torch.zeros(1)}),
        f"tensors that the model has no place for: {ATTENTION}_zero_point",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_checkpoints(fp8_checkpoint: Path, tmp_path: Path, name: str) -> None:
    change, message = BAD[name]
    path = changed(fp8_checkpoint, tmp_path / "bad", change, SCHEMES["fp8"][1])
    with pytest.raises(ValueError) as error:
        load(path, expert_format="int8")
    assert message in str(error.value)
    assert str(path) in str(error.value) or "the model needs" in message or "no place" in message


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        ("int4-32", lambda t: t.update({CODES: torch.zeros(160, 192)}), f"no place for: {CODES};"),
        (
            "int4-32",
            lambda t: t.update({f"{CODES}_shape": torch.tensor([160, 184])}),
            "weight_packed: its weight_shape says [160, 184], its codes are [160, 192]",
        ),
        ("gptq", lambda t: t[G_IDX][:1].fill_(99), "3.up_proj.qweight: its g_idx holds 0 to 99, it has 6 groups"),
    ],
    ids=["both plain and packed", "wrong weight_shape", "group index out of range"],
)
def test_bad_codes_of_other_schemes(plain: Path, tmp_path: Path, scheme: str, change: Any, message: str) -> None:
    quantized, _, _ = quantize(plain, tmp_path, scheme)
    path = changed(quantized, tmp_path / "bad", change, SCHEMES[scheme][1])
    with pytest.raises(ValueError, match=re.escape(message)):
        load(path)
