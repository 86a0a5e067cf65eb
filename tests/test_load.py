"""From shards into packed experts: every layout of a family's tensors, and codes that stay as they are."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import pytest
import torch
from contract import empty_layer, relative
from quantize import SCHEMES, SLACK, encode_stacked, fp8, int4, mxfp4, stacked_name
from safetensors.torch import save_file
from torch import Tensor

from ktft import native
from ktft.checkpoint.families import Family
from ktft.checkpoint.layouts import Layout
from ktft.checkpoint.load import ExpertPlan
from ktft.checkpoint.reader import SINGLE_NAME, CheckpointReader
from ktft.config import PROJECTIONS

# --- layouts: stacked, fused, interleaved, transposed -----------------------------------------------------------------


HIDDEN, INTER = 192, 128
LAYOUTS = [
    Layout("e.experts.{projection}", ("gate_up_proj", "gate_up_proj", "down_proj"), interleaved, transposed)
    for interleaved, transposed in product((False, True), repeat=2)
]


SHAPES = {"e.experts.gate_up_proj": (2 * INTER, HIDDEN), "e.experts.down_proj": (HIDDEN, INTER)}


def matrix_of(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 8


def fill(folder: Path, layout: Layout, expert_format: str) -> native.ExpertLayer:
    layer = empty_layer(HIDDEN, INTER, expert_format, num_experts=3)
    family = Family("stacked", ("stacked",), "StackedExperts", layouts=(layout,))
    plan = ExpertPlan(CheckpointReader.from_directory(folder), family, {0: layer})
    assert sum(plan.load({0: layer})) == plan.nbytes()
    return layer


@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda each: f"interleaved={each.interleaved}-transposed={each.transposed}"
)
@pytest.mark.parametrize("kind", ["plain", "fp8", "mxfp4"])
def test_stacked_experts(tmp_path: Path, layout: Layout, kind: str) -> None:
    """Every layout of `ExpertSource`, with the native format keeping the codes wherever whole blocks stay together."""
    stored: dict[str, Tensor] = {}
    expected: dict[tuple[int, str], Tensor] = {}
    encode = {"plain": lambda w: ({"weight": w.bfloat16()}, w.bfloat16().float()), "fp8": fp8, "mxfp4": mxfp4}[kind]
    for stem, shape in SHAPES.items():
        experts = torch.stack([matrix_of(*shape, seed=number) for number in range(3)])
        if layout.transposed:
            experts = experts.mT.contiguous()
        tensors, values = encode_stacked(encode, experts, layout.transposed)
        stored |= {stacked_name(stem, part): tensor.contiguous() for part, tensor in tensors.items()}
        for number, projection in product(range(3), PROJECTIONS):
            source = layout.source(0, number, projection, INTER)
            if source.stem == stem:
                expected[number, projection] = (values[number].T if layout.transposed else values[number])[source.rows]
    save_file(stored, tmp_path / SINGLE_NAME)
    method = {"fp8": SCHEMES["fp8"][1], "mxfp4": {"quant_method": "mxfp4"}, "plain": None}[kind]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": method}))
    for expert_format in ("bf16", *(() if kind == "plain" else (kind,))):
        layer = fill(tmp_path, layout, expert_format)
        for (number, projection), values in expected.items():
            found = layer.dequantize(number, projection)
            if expert_format == "fp8" and layout.interleaved and projection != "down_proj":
                assert relative(found, values) < 0.05  # every second row: blocks are other ones, so it is encoded anew
            else:
                assert torch.equal(found, values.bfloat16().float()), (number, projection, expert_format)


def test_a_stacked_tensor_is_read_expert_by_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = {name: torch.randn(3, *shape) for name, shape in SHAPES.items()}
    save_file(stored, tmp_path / SINGLE_NAME)
    reads: list[tuple[str, int | None, int]] = []
    original = CheckpointReader.read

    def spy(reader: CheckpointReader, name: str, index: int | None = None) -> Tensor:
        tensor = original(reader, name, index)
        reads.append((name, index, tensor.nbytes))
        return tensor

    monkeypatch.setattr(CheckpointReader, "read", spy)
    fill(tmp_path, LAYOUTS[0], "bf16")
    assert sorted(reads) == sorted((name, i, t[i].nbytes) for name, t in stored.items() for i in range(3)), "once each"


# --- native: codes that are kept --------------------------------------------------------------------------------------


def layer_of(expert_format: str, rows: int, cols: int, nodes: int = 1) -> native.ExpertLayer:
    return empty_layer(rows, cols, expert_format, nodes=nodes, num_experts=1)


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("rows", "cols"), [(64, 256), (160, 416), (288, 160)])
def test_codes_are_kept(rows: int, cols: int, nodes: int) -> None:
    weight = matrix_of(rows, cols)
    tensors, values = fp8(weight)
    layer = layer_of("fp8", rows, cols, nodes)
    block = (128, 128) if rows > 128 else None
    assert layer.load(0, "down_proj", tensors["weight"], tensors["weight_scale_inv"], block=block)
    assert torch.equal(layer.dequantize(0, "down_proj"), values.bfloat16().float())

    tensors, values = int4(weight)
    layer = layer_of("int4", rows, cols, nodes)
    codes = tensors["weight_packed"].view(torch.uint8)
    assert layer.load(0, "down_proj", codes, tensors["weight_scale"].float())
    assert torch.equal(layer.dequantize(0, "down_proj").bfloat16(), values.bfloat16())

    tensors, values = mxfp4(weight)
    layer = layer_of("mxfp4", rows, cols, nodes)
    assert layer.load(0, "down_proj", tensors["blocks"].flatten(1), tensors["scales"])
    assert torch.equal(layer.dequantize(0, "down_proj"), values)
    assert not layer_of("int4", rows, cols, nodes).load(0, "down_proj", tensors["blocks"].flatten(1), tensors["scales"])


def test_without_the_scales_they_would_be_lost() -> None:
    """What `test_codes_are_kept` tells apart: an encoder that looks for scales in the values finds others."""
    _, values = fp8(matrix_of(192, 128))
    layer = layer_of("fp8", 192, 128)
    layer.load(0, "down_proj", values)
    assert SLACK != 1 and not torch.equal(layer.dequantize(0, "down_proj"), values.bfloat16().float())


FP8, CODES = torch.zeros(64, 64, dtype=torch.float8_e4m3fn), torch.zeros(64, 32, dtype=torch.uint8)
ONE = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("codes", "scales", "zeros", "message"),
    [
        (torch.zeros(64, 64, dtype=torch.int8), ONE, None, "codes with scales are float8_e4m3fn, or uint8"),
        (torch.zeros(64, 64), ONE, None, "codes with scales are float8_e4m3fn"),
        (FP8, None, None, "or codes and scales, got torch.float8_e4m3fn"),
        (FP8, torch.ones(2, 1), None, "codes [64, 64] in blocks of [128, 128] need scales [1, 1], got [2, 1]"),
        (FP8, ONE * torch.nan, None, "scales hold NaN or Inf"),
        (FP8, -ONE, None, "a negative number, which no fp8"),
        (torch.full((64, 64), torch.nan).to(FP8.dtype), ONE, None, "NaN or Inf, for instance at [0"),
        (CODES, torch.full((64, 2), 255, dtype=torch.uint8), None, "NaN or Inf"),
        (CODES, torch.ones(64, 2).half(), None, "scales of torch.uint8 codes cannot be"),
        (CODES, torch.ones(64, 2), CODES[:, :1], "zero points must be uint8 [64, 2] of int4"),
    ],
)
def test_bad_codes(codes: Tensor, scales: Tensor | None, zeros: Tensor | None, message: str) -> None:
    for expert_format in ("fp8", "int4", "int8"):
        with pytest.raises(ValueError, match=re.escape(message)):
            layer_of(expert_format, 64, 64).load(0, "down_proj", codes, scales, zeros=zeros)
