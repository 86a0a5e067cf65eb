"""LoRA dropout: the layer against fp32 with the masks that its generator is defined to give."""

from __future__ import annotations

import pytest
import torch
from contract import (
    MORE_THAN_ONE_CALL,
    TAILS,
    assert_contract,
    compare,
    dropout_oracle,
    emulation_in_full,
    inputs_for,
    make_layer,
    make_lora,
)

from ktft import native
from ktft.lora import ExpertLora
from ktft.model.autograd import routed_experts


@pytest.mark.parametrize("activation", ["retain", "recompute"])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("isa", emulation_in_full(native.isas()))
def test_contract(isa: str, nodes: int, activation: str) -> None:
    layer = make_layer(32, 160, "int8", isa, nodes, nodes)
    lora = make_lora(32, 160, 33, torch.float32, dropout=0.2, seed=2**63 + 5)
    assert_contract(compare(layer, lora, *inputs_for(TAILS[1], 32), activation, dropout_oracle))


@pytest.mark.parametrize("isa", emulation_in_full(native.isas()))
def test_more_rows_than_one_call_takes(isa: str) -> None:
    layer = make_layer(32, 32, "bf16", isa, 2)
    lora = make_lora(32, 32, 33, torch.float32, dropout=0.5, seed=3)
    assert_contract(compare(layer, lora, *inputs_for(MORE_THAN_ONE_CALL, 32), oracle=dropout_oracle))


@pytest.mark.parametrize("names", [("gate_proj",), ("up_proj", "down_proj")])
def test_subset_of_projections(names: tuple[str, ...]) -> None:
    layer = make_layer(64, 96, "k4", native.default_isa(), 2)
    lora = make_lora(64, 96, 8, torch.float32, names, dropout=0.1, seed=9)
    assert_contract(compare(layer, lora, *inputs_for(TAILS[1], 64), oracle=dropout_oracle))


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
