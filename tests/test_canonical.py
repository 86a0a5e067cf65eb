"""Packed weights as the bytes that files hold: the same whatever the NUMA split, taken over by any other one."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from ktft import native
from ktft.config import PROJECTIONS


@pytest.mark.parametrize("expert_format", native.FORMATS)
def test_packed_bytes_do_not_depend_on_the_split(expert_format: str) -> None:
    torch.manual_seed(0)
    hidden, intermediate = 160, 288
    weights = {
        (e, p): torch.randn((hidden, intermediate) if p == "down_proj" else (intermediate, hidden))
        for e, p in product(range(2), PROJECTIONS)
    }

    def make(nodes: int, threads: int) -> native.ExpertLayer:
        return native.ExpertLayer(
            native.runtime(threads, nodes),
            num_experts=2,
            hidden_size=hidden,
            intermediate_size=intermediate,
            format=expert_format,
        )

    layers = {}
    for nodes, threads in ((1, 1), (2, 2), (3, 2)):
        layers[nodes] = make(nodes, threads)
        for key, weight in weights.items():
            layers[nodes].load(*key, weight)
    for (exporting, other), key in product(product(layers, layers), weights):
        assert torch.equal(layers[exporting].export_packed(*key), layers[other].export_packed(*key))
    for nodes in (1, 2, 3):
        layer = make(nodes, 2)
        for key in weights:
            layer.import_packed(*key, layers[4 - nodes].export_packed(*key))
            assert torch.equal(layer.dequantize(*key), layers[1].dequantize(*key))
        assert not layer.missing()


def test_packed_bytes_that_cannot_be() -> None:
    def make() -> native.ExpertLayer:
        return native.ExpertLayer(
            native.runtime(1, 1), num_experts=1, hidden_size=32, intermediate_size=32, format="int8"
        )

    layer, other = make(), make()
    with pytest.raises(ValueError, match="expert 0 was not loaded"):
        layer.export_packed(0, "up_proj")
    layer.load(0, "up_proj", torch.ones(32, 32))
    good = layer.export_packed(0, "up_proj")
    with pytest.raises(ValueError, match="loaded already"):
        layer.import_packed(0, "up_proj", good)
    with pytest.raises(ValueError, match=f"expected {len(good)} bytes of int8, got .{len(good) - 1}."):
        other.import_packed(0, "up_proj", good[1:])
    with pytest.raises(ValueError, match="expert 1 does not exist"):
        other.import_packed(1, "up_proj", good)
    for value in (float("nan"), float("inf"), 0.0, -1.0):
        bad = good.clone()
        bad[-4:] = torch.tensor([value]).view(torch.uint8)
        with pytest.raises(ValueError, match="NaN, Inf or not positive"):
            other.import_packed(0, "up_proj", bad)
    assert other.missing()
