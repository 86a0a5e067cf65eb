"""Pack a matrix as an expert and read it back, to see what a format does to weights."""

from __future__ import annotations

import torch
from contract import empty_layer
from torch import Tensor

from ktft import native


def pack(fmt: str, weight: Tensor, nodes: int = 1) -> native.ExpertLayer:
    """A layer of one expert, whose gate projection is `weight` [intermediate, hidden]."""
    layer = empty_layer(weight.shape[1], weight.shape[0], fmt, nodes=nodes, num_experts=1)
    layer.load(0, "gate_proj", weight)
    return layer


def round_trip(fmt: str, weight: Tensor) -> Tensor:
    return pack(fmt, weight).dequantize(0, "gate_proj")


def error_percent(actual: Tensor, expected: Tensor) -> float:
    return 100 * float((actual.double() - expected.double()).norm() / expected.double().norm())


def gaussian(rows: int, cols: int) -> Tensor:
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(5))


def student_t5(rows: int, cols: int) -> Tensor:
    """t = normal / sqrt(chi2 / 5), chi2 the sum of five squared normals."""
    generator = torch.Generator().manual_seed(6)
    chi2 = torch.randn(5, rows, cols, generator=generator).square().sum(0)
    return torch.randn(rows, cols, generator=generator) / (chi2 / 5).sqrt()
