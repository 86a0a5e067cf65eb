"""Packed weights as bytes in files: the same for every NUMA split, and imported by any other split."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from contract import empty_layer, make_layer, make_weights

from ktft import native


@pytest.mark.parametrize("expert_format", native.FORMATS)
def test_packed_bytes_do_not_depend_on_the_split(expert_format: str) -> None:
    # 4 units of 128 columns, the last one of 32
    sizes, weights = (160, 416, expert_format), make_weights(160, 416)
    layers = {
        nodes: make_layer(*sizes, threads=threads, nodes=nodes, weights=weights)
        for nodes, threads in ((1, 1), (2, 2), (3, 2))
    }
    for (exporting, other), key in product(product(layers, layers), weights):
        assert torch.equal(layers[exporting].export_packed(*key), layers[other].export_packed(*key))
    for nodes in (1, 2, 3):
        layer = empty_layer(*sizes, threads=2, nodes=nodes)
        for key in weights:
            layer.import_packed(*key, layers[4 - nodes].export_packed(*key))
            for split in (layer, layers[nodes]):
                assert torch.equal(split.dequantize(*key), layers[1].dequantize(*key))
        assert not layer.missing()


def test_invalid_packed_bytes_are_refused() -> None:
    layer, other = (empty_layer(32, 32, "int8", num_experts=1) for _ in range(2))
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
