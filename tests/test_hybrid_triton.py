"""The Triton kernels for few tokens: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import contract
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from hot import ISA, check_mix, hot_experts, routing, start
from interpreted import DEVICE, bf16_in_the_interpreter
from toy_format import check_products, toy

from ktft import reference
from ktft.config import EXPERT_FORMATS, PROJECTIONS
from ktft.native import ExpertLayer
from ktft.serve.runtime import triton_resident

__all__ = ["bf16_in_the_interpreter", "toy"]


@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_every_format(fmt: str) -> None:
    layer = contract.make_layer(160, 160, fmt, ISA, nodes=2)
    check_mix(triton_resident, layer, device=DEVICE, tokens=2)


def test_a_new_format_needs_its_row_alone(toy: ExpertLayer) -> None:
    check_products(toy, triton_resident, DEVICE)


def test_more_columns_than_a_program_takes_at_once() -> None:
    layer = contract.make_layer(544, 32, "k4", ISA)
    check_mix(triton_resident, layer, contract.make_lora(544, 32, 33, torch.float32), device=DEVICE, tokens=1)


def test_biases_and_another_activation() -> None:
    layer = contract.make_gated(96, 160, "mxfp4", ISA, nodes=2, swiglu=contract.GPT_OSS)
    lora = contract.small_lora(96, 160, 8, torch.float32)
    check_mix(triton_resident, layer, lora, contract.gated_oracle(layer), device=DEVICE, tokens=2)


@pytest.mark.parametrize("name", PROJECTIONS)
def test_one_projection_has_an_adapter_and_all_had_one_before(name: str) -> None:
    layer = contract.make_layer(32, 64, "int8", ISA)
    hot = hot_experts(layer, rank=16, device=DEVICE)
    start(hot, *range(contract.EXPERTS))
    hot.set_adapter(1, {0: contract.make_lora(32, 64, 16, torch.float32)})
    lora = contract.make_lora(32, 64, 3, torch.float32, (name,))
    hot.set_adapter(1, {0: lora})
    x, (index, weights) = torch.randn(2, 32).bfloat16(), routing(2)
    blocks, _ = triton_resident.route(hot.layers[0], index.to(DEVICE))
    of_token = torch.ones(2, dtype=torch.int32, device=DEVICE)
    out = triton_resident.forward(hot.layers[0], x.to(DEVICE), blocks, weights.to(DEVICE), of_token)
    expected = reference.moe(x.float(), index, weights, *contract.dequantized(layer), lora)
    assert contract.relative(out.cpu(), expected) < contract.OUTPUT_TOLERANCE
