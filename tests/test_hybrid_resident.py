"""Experts that are resident on a GPU, for a few tokens, against the fp32 reference; emulated by the CPU's torch."""

from __future__ import annotations

import pytest
import torch
from contract import GPT_OSS, gated_oracle, make_gated, make_layer, make_lora, small_lora
from hot import ISA, check_mix

from ktft.config import EXPERT_FORMATS
from ktft.serve.runtime import torch_resident


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_every_format(fmt: str, rank: int) -> None:
    layer = make_layer(160, 288, fmt, ISA, nodes=2)
    check_mix(torch_resident, layer, make_lora(160, 288, rank, torch.float32) if rank else None)


@pytest.mark.parametrize("rank", [0, 33])
def test_biases_and_another_activation(rank: int) -> None:
    layer = make_gated(160, 288, "mxfp4", ISA, nodes=2, swiglu=GPT_OSS)
    check_mix(torch_resident, layer, small_lora(160, 288, rank, torch.float32) if rank else None, gated_oracle(layer))
