"""LoRA dropout: the layer against fp32 with the masks that its generator is defined to give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_kernels import (
    MORE_THAN_ONE_CALL,
    TAILS,
    TOP_K,
    assert_contract,
    compare,
    inputs_for,
    make_layer,
    make_lora,
)
from torch import Tensor

from ktft import native
from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora
from ktft.model.autograd import routed_experts


def mix64(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def mask(lora: ExpertLora, projection: str, route: int, cols: int) -> np.ndarray:
    """Which inputs of one route (token * top_k + slot) stay: splitmix64 keys, lowbias32 for each element."""
    stream = mix64((lora.seed + 0x9E3779B97F4A7C15 * (PROJECTIONS.index(projection) + 1)) % 2**64)
    key = mix64((stream + route) % 2**64)
    z = np.arange(cols, dtype=np.uint32) * np.uint32(0x9E3779B9) ^ np.uint32(key % 2**32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        z = (z ^ z >> np.uint32(shift)) * np.uint32(factor)
    return (z ^ np.uint32(key >> 32)) >= np.uint32(np.float32(lora.dropout) * 2.0**32)


def oracle(x: Tensor, index: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor, lora: ExpertLora):
    """`reference.moe` with dropout."""

    def project(x: Tensor, routes: Tensor, expert: int, name: str, weight: Tensor) -> Tensor:
        if (pair := lora.pairs.get(name)) is None:
            return F.linear(x, weight[expert])
        stays = torch.from_numpy(np.stack([mask(lora, name, int(route), x.shape[1]) for route in routes]))
        low = F.linear(x * stays / (1 - lora.dropout), pair.a[expert])
        return F.linear(x, weight[expert]) + pair.scaling * F.linear(low, pair.b[expert])

    out = torch.zeros_like(x)
    for expert in index.unique().tolist():
        token, slot = torch.where(index == expert)
        rows, routes = x[token], token * TOP_K + slot
        h = F.silu(project(rows, routes, expert, "gate_proj", gate)) * project(rows, routes, expert, "up_proj", up)
        out = out.index_add(0, token, project(h, routes, expert, "down_proj", down) * weights[token, slot, None])
    return out


@pytest.mark.parametrize("activation", ["retain", "recompute"])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("isa", native.isas())
def test_contract(isa: str, nodes: int, activation: str) -> None:
    layer = make_layer(32, 160, "int8", isa, nodes, nodes)
    lora = make_lora(32, 160, 33, torch.float32, dropout=0.2, seed=2**63 + 5)
    assert_contract(compare(layer, lora, *inputs_for(TAILS[1], 32), activation, oracle))


@pytest.mark.parametrize("isa", native.isas())
def test_more_rows_than_one_call_takes(isa: str) -> None:
    layer = make_layer(32, 32, "bf16", isa, 2)
    lora = make_lora(32, 32, 33, torch.float32, dropout=0.5, seed=3)
    assert_contract(compare(layer, lora, *inputs_for(MORE_THAN_ONE_CALL, 32), oracle=oracle))


@pytest.mark.parametrize("names", [("gate_proj",), ("up_proj", "down_proj")])
def test_subset_of_projections(names: tuple[str, ...]) -> None:
    layer = make_layer(64, 96, "k4", native.default_isa(), 2)
    lora = make_lora(64, 96, 8, torch.float32, names, dropout=0.1, seed=9)
    assert_contract(compare(layer, lora, *inputs_for(TAILS[1], 64), oracle=oracle))


def test_one_seed_one_mask() -> None:
    layer = make_layer(64, 64, "bf16", native.default_isa())
    inputs = inputs_for(TAILS[1], 64)
    pairs = make_lora(64, 64, 8, torch.float32).pairs
    first, again, other, none = (
        routed_experts(layer, *inputs, ExpertLora(pairs, dropout=p, seed=seed)).detach()
        for p, seed in ((0.25, 1), (0.25, 1), (0.25, 2), (0.0, 1))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(none, routed_experts(layer, *inputs, ExpertLora(pairs)))
