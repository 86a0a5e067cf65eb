"""The Triton kernels for few tokens: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from test_hybrid_resident import ISA, check_mix, hot_experts, routing, start
from test_kernels import make_layer, make_lora, relative
from test_lanes_triton import DEVICE, bf16_in_the_interpreter
from test_swiglu import GPT_OSS, make, small_lora
from test_swiglu import oracle as swiglu_oracle

from ktft.config import EXPERT_FORMATS, PROJECTIONS
from ktft.serve import torch_resident, triton_resident

__all__ = ["bf16_in_the_interpreter"]


@pytest.mark.parametrize("rank", [0, 33])
@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_every_format(fmt: str, rank: int) -> None:
    layer = make_layer(160, 288, fmt, ISA, nodes=2)
    lora = make_lora(160, 288, rank, torch.float32) if rank else None
    check_mix(triton_resident, layer, lora, device=DEVICE)


def test_biases_and_another_activation() -> None:
    layer = make(160, 288, "mxfp4", ISA, nodes=2, swiglu=GPT_OSS)
    lora = small_lora(160, 288, 8, torch.float32)
    check_mix(triton_resident, layer, lora, swiglu_oracle(layer), device=DEVICE)


def test_one_projection_has_an_adapter() -> None:
    layer = make_layer(64, 160, "k4", ISA)
    x, (index, weights) = torch.randn(2, 64).bfloat16(), routing(2)
    for name in PROJECTIONS:
        found = []
        for ops, device in ((triton_resident, DEVICE), (torch_resident, "cpu")):
            hot = hot_experts(layer, rank=16, device=device)
            start(hot, 0, 1, 2, 3)
            torch.manual_seed(1)
            hot.set_lora({0: make_lora(64, 160, 8, torch.float32)})  # its traces must not be seen
            hot.set_lora({0: make_lora(64, 160, 3, torch.float32, (name,))})
            blocks, _ = ops.route(hot.layers[0], index.to(device))
            found.append(ops.forward(hot.layers[0], x.to(device), blocks, weights.to(device)).cpu())
        assert relative(*found) < 0.002
