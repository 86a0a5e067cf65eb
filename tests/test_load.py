"""From shards into packed experts: every layout of a family's tensors, and codes that stay as they are."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from quantize import SCHEMES, SLACK, fp8, int4, mxfp4
from safetensors.torch import save_file
from torch import Tensor

from ktft import native
from ktft.checkpoint.families import ExpertSource
from ktft.checkpoint.load import ExpertPlan
from ktft.checkpoint.reader import SINGLE_NAME, CheckpointReader
from ktft.config import PROJECTIONS


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


# --- layouts: stacked, fused, interleaved, transposed -----------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """A family of one layer with its experts stacked in two tensors, as `ExpertPlan` sees families."""

    interleaved: bool = False
    transposed: bool = False
    inter: int = 128

    def source(self, layer: int, expert: int, projection: str) -> ExpertSource:
        if projection == "down_proj":
            return ExpertSource("e.down_proj", expert, transposed=self.transposed)
        second = projection == "up_proj"
        halves = slice(self.inter, None) if second else slice(0, self.inter)
        rows = slice(int(second), None, 2) if self.interleaved else halves
        return ExpertSource("e.gate_up_proj", expert, rows, self.transposed)

    def expert_pattern(self) -> re.Pattern[str]:
        return re.compile(r"^e\.")

    def fuse(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.stack([gate, up], 1).flatten(0, 1) if self.interleaved else torch.cat([gate, up])


def random_experts(experts: int = 3, hidden: int = 192, inter: int = 128) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    shapes = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden), "down_proj": (hidden, inter)}
    return [
        {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()} for _ in range(experts)
    ]


def fill(folder: Path, layout: Any, expert_format: str, inter: int = 128) -> native.ExpertLayer:
    layer = native.ExpertLayer(
        native.runtime(1, 1), num_experts=3, hidden_size=192, intermediate_size=inter, format=expert_format
    )
    plan = ExpertPlan(CheckpointReader.from_directory(folder), layout, {0: layer})
    assert sum(plan.load({0: layer})) == plan.nbytes()
    return layer


LAYOUTS = [
    Layout(interleaved=interleaved, transposed=transposed)
    for interleaved in (False, True)
    for transposed in (False, True)
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "fp8", "mxfp4"])
def test_stacked_experts(tmp_path: Path, layout: Layout, kind: str) -> None:
    """Every layout of `ExpertSource`, with the native format keeping the codes wherever whole blocks stay together."""
    experts = random_experts()
    stored: dict[str, list[Tensor]] = {}
    expected: dict[tuple[int, str], Tensor] = {}
    encode = {"plain": lambda w: ({"weight": w.bfloat16()}, w.bfloat16().float()), "fp8": fp8, "mxfp4": mxfp4}[kind]
    for number, expert in enumerate(experts):
        for stem, matrix in (
            ("e.gate_up_proj", layout.fuse(expert["gate_proj"], expert["up_proj"])),
            ("e.down_proj", expert["down_proj"]),
        ):
            flip = layout.transposed and kind != "mxfp4"  # its blocks lie by output rows always
            tensors, values = encode(matrix.T.contiguous() if flip else matrix)
            values = values.T if flip else values
            for part, tensor in tensors.items():
                suffix = f"_{part}" if kind == "mxfp4" else part.removeprefix("weight")
                stored.setdefault(stem + suffix, []).append(tensor)
            for projection in PROJECTIONS:
                source = layout.source(0, number, projection)
                if source.stem == stem:
                    expected[number, projection] = values[source.rows]
    save_file({name: torch.stack(parts).contiguous() for name, parts in stored.items()}, tmp_path / SINGLE_NAME)
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
    layout = Layout()
    experts = random_experts()
    save_file(
        {
            "e.gate_up_proj": torch.stack([layout.fuse(e["gate_proj"], e["up_proj"]) for e in experts]),
            "e.down_proj": torch.stack([e["down_proj"] for e in experts]),
        },
        tmp_path / SINGLE_NAME,
    )
    reads: list[tuple[str, int | None, int]] = []
    original = CheckpointReader.read

    def spy(reader: CheckpointReader, name: str, index: int | None = None) -> Tensor:
        tensor = original(reader, name, index)
        reads.append((name, index, tensor.nbytes))
        return tensor

    monkeypatch.setattr(CheckpointReader, "read", spy)
    fill(tmp_path, layout, "bf16")
    sizes = {"e.gate_up_proj": 2 * 128 * 192 * 4, "e.down_proj": 128 * 192 * 4}
    assert sorted(reads) == sorted((name, i, size) for name, size in sizes.items() for i in range(3)), "once each"


# --- native: codes that are kept --------------------------------------------------------------------------------------


def layer_of(expert_format: str, rows: int, cols: int, nodes: int = 1) -> native.ExpertLayer:
    return native.ExpertLayer(
        native.runtime(1, nodes), num_experts=1, hidden_size=rows, intermediate_size=cols, format=expert_format
    )


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("rows", "cols"), [(64, 256), (160, 416), (288, 160)])
def test_codes_are_kept(rows: int, cols: int, nodes: int) -> None:
    weight = random_experts(1, rows, cols)[0]["down_proj"]
    tensors, values = fp8(weight)
    layer = layer_of("fp8", rows, cols, nodes)
    assert layer.load(
        0, "down_proj", tensors["weight"], tensors["weight_scale_inv"], block=(128, 128) if rows > 128 else None
    )
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
    _, values = fp8(random_experts(1)[0]["down_proj"])
    layer = layer_of("fp8", 192, 128)
    layer.load(0, "down_proj", values)
    assert SLACK != 1 and not torch.equal(layer.dequantize(0, "down_proj"), values.bfloat16().float())


@pytest.mark.parametrize(
    ("codes", "scales", "options", "message"),
    [
        (torch.zeros(64, 64, dtype=torch.int8), torch.ones(1, 1), {}, "codes with scales are float8_e4m3fn, or uint8"),
        (torch.zeros(64, 64), torch.ones(1, 1), {}, "codes with scales are float8_e4m3fn"),
        (torch.zeros(64, 64, dtype=torch.float8_e4m3fn), None, {}, "or codes and scales, got torch.float8_e4m3fn"),
        (
            torch.zeros(64, 64, dtype=torch.float8_e4m3fn),
            torch.ones(2, 1),
            {},
            "codes [64, 64] in blocks of [128, 128] need scales [1, 1], got [2, 1]",
        ),
        (torch.zeros(64, 64, dtype=torch.float8_e4m3fn), torch.full((1, 1), torch.nan), {}, "scales hold NaN or Inf"),
        (torch.zeros(64, 64, dtype=torch.float8_e4m3fn), -torch.ones(1, 1), {}, "a negative number, which no fp8"),
        (
            torch.full((64, 64), torch.nan).to(torch.float8_e4m3fn),
            torch.ones(1, 1),
            {},
            "NaN or Inf, for instance at [0",
        ),
        (torch.zeros(64, 32, dtype=torch.uint8), torch.full((64, 2), 255, dtype=torch.uint8), {}, "NaN or Inf"),
        (torch.zeros(64, 32, dtype=torch.uint8), torch.ones(64, 2).half(), {}, "scales of torch.uint8 codes cannot be"),
        (
            torch.zeros(64, 32, dtype=torch.uint8),
            torch.ones(64, 2),
            {"zeros": torch.zeros(64, 1, dtype=torch.uint8)},
            "zero points must be uint8 [64, 2] of int4",
        ),
    ],
)
def test_bad_codes(codes: Tensor, scales: Tensor | None, options: dict[str, Any], message: str) -> None:
    for expert_format in ("fp8", "int4", "int8"):
        with pytest.raises(ValueError) as error:
            layer_of(expert_format, 64, 64).load(0, "down_proj", codes, scales, **options)
        assert message in str(error.value)
