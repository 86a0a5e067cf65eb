"""Experts without a gate, h = max(up, 0)², held to the same contract as SiLU's, on the CPU and in the lanes."""

from __future__ import annotations

import functools

import pytest
import torch
from contract import (
    CASES,
    EXPERTS,
    MORE_THAN_ONE_CALL,
    SIZES,
    TAILS,
    assert_contract,
    compare,
    dequantized,
    dropout_oracle,
    empty_layer,
    emulation_in_full,
    gated_oracle,
    in_every_way,
    inputs_for,
    make_gated,
    make_layer,
    make_lora,
    relative,
    small_lora,
)
from lanes import Lane
from torch import Tensor
from torch.nn import functional

from ktft import native, reference
from ktft.config import EXPERT_FORMATS
from ktft.lanes.decide.costs import LayerKind
from ktft.lora import ExpertLora
from ktft.model.autograd import routed_experts
from ktft.swiglu import RELU2, SILU

ISA = native.default_isa()
NAMES = RELU2.projections
make = functools.partial(make_layer, swiglu=RELU2)
make_biased = functools.partial(make_gated, swiglu=RELU2)


LANE_OUTPUT_TOLERANCE = 0.006
"""The lanes round up to bf16 before they square it, which doubles what that adds: 0.52% was measured at most."""


def assert_lane_contract(errors: dict[str, float]) -> None:
    assert errors.pop("output") <= LANE_OUTPUT_TOLERANCE
    assert_contract(errors)


def lora_of(hidden: int, intermediate: int, rank: int, **options) -> ExpertLora:
    return make_lora(hidden, intermediate, rank, torch.float32, NAMES, **options)


def test_the_formula_is_that_of_the_models() -> None:
    x, index, weights = (tensor.detach() for tensor in inputs_for((3, 0, 4, 0, 1), 32, torch.float32))
    up, down = torch.randn(EXPERTS, 96, 32), torch.randn(EXPERTS, 32, 96)
    expected = torch.zeros_like(x)
    for token, (experts, each) in enumerate(zip(index.tolist(), weights, strict=True)):
        for expert, weight in zip(experts, each, strict=True):
            expected[token] += weight * (down[expert] @ functional.relu(up[expert] @ x[token]).pow(2))
    assert relative(reference.moe(x, index, weights, None, up, down, swiglu=RELU2), expected) < 1e-5


@in_every_way(CASES)
def test_contract(isa: str, fmt: str, nodes: int, threads: int, activation: str) -> None:
    for hidden, intermediate, rank, rows in SIZES[nodes]:
        layer = make(hidden, intermediate, fmt, isa, threads, nodes)
        lora = lora_of(hidden, intermediate, rank)
        assert_contract(compare(layer, lora, *inputs_for(rows, hidden), activation, gated_oracle(layer)))


@pytest.mark.parametrize("isa", emulation_in_full(native.isas()))
def test_more_rows_than_one_call_takes(isa: str) -> None:
    layer = make(32, 96, "int8", isa, 2)
    inputs = inputs_for(MORE_THAN_ONE_CALL, 32)
    assert_contract(compare(layer, lora_of(32, 96, 8), *inputs, oracle=gated_oracle(layer)))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("isa", emulation_in_full(native.isas()))
def test_biases_dropout_and_subsets(isa: str, nodes: int) -> None:
    layer = make_biased(64, 160, "int8", isa, nodes, nodes)
    for lora in (None, small_lora(64, 160, 4, torch.float32, NAMES), small_lora(64, 160, 4, torch.float32, NAMES[:1])):
        assert_contract(compare(layer, lora, *inputs_for(TAILS[1], 64), oracle=gated_oracle(layer)))
    layer = make(64, 160, "k4", isa, nodes, nodes)
    lora = lora_of(64, 160, 33, dropout=0.2, seed=2**63 + 5)
    assert_contract(compare(layer, lora, *inputs_for(TAILS[1], 64), "recompute", dropout_oracle))


@pytest.mark.parametrize("nodes", [1, 2, 3])
@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_contract_in_a_lane(fmt: str, nodes: int) -> None:
    for hidden, intermediate, rank, rows in SIZES[nodes]:
        layer = make(hidden, intermediate, fmt, ISA, nodes=nodes)
        lora = lora_of(hidden, intermediate, rank)
        assert_lane_contract(
            compare(layer, lora, *inputs_for(rows, hidden), oracle=gated_oracle(layer), forward=Lane())
        )


def test_biases_and_dropout_in_a_lane() -> None:
    layer = make_biased(64, 160, "mxfp4", ISA, nodes=2)
    inputs = inputs_for(TAILS[1], 64)
    for lora in (None, small_lora(64, 160, 8, torch.float32, NAMES)):
        assert_lane_contract(compare(layer, lora, *inputs, oracle=gated_oracle(layer), forward=Lane()))
    layer = make(32, 160, "int8", ISA)
    lora = lora_of(32, 160, 33, dropout=0.2, seed=9)
    inputs = inputs_for(TAILS[1], 32)
    assert_lane_contract(compare(layer, lora, *inputs, oracle=dropout_oracle, forward=Lane()))


@pytest.mark.parametrize("isa", emulation_in_full(native.isas()))
def test_same_bits_whatever_the_threads_and_the_policy(isa: str) -> None:
    results: list[list[Tensor]] = []
    for threads, activation in ((1, "retain"), (2, "recompute"), (3, "retain")):
        layer = make_biased(64, 96, "int8", isa, threads)
        torch.manual_seed(1)
        lora = small_lora(64, 96, 33, torch.float32, NAMES, dropout=0.1, seed=11)
        x, index, weights = inputs_for(TAILS[1], 64)
        out = routed_experts(layer, x, index, weights, lora, activation)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), [x, weights, *lora.parameters()])])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_layers_of_both_kinds_take_turns() -> None:
    """They share one workspace, where the one leaves memory that the other does not have."""
    layers = [make(64, 96, "int8", ISA), make_layer(64, 96, "int8", ISA)] * 2
    for layer in layers:
        lora = make_lora(64, 96, 8, torch.float32, layer.projections)
        for activation in ("recompute", "retain"):
            assert_contract(compare(layer, lora, *inputs_for(TAILS[1], 64), activation, gated_oracle(layer)))


def test_8_bit_activations() -> None:
    isas = [isa for isa in native.isas() if isa.startswith("amx")] or ["amx_emu"]
    layer = make(64, 160, "int8", isas[-1], 2, 2)
    x, index, weights = (tensor.detach() for tensor in inputs_for(TAILS[1], 64))
    lora = lora_of(64, 160, 4)
    out, _ = layer.forward(x, index, weights, lora, "none", activation_bits=8)
    assert relative(out, gated_oracle(layer)(x.float(), index, weights, *dequantized(layer), lora)) < 0.03


@pytest.mark.parametrize("fmt", EXPERT_FORMATS)
def test_an_expert_has_two_matrices(fmt: str) -> None:
    layer, three = make(64, 160, fmt, ISA), make_layer(64, 160, fmt, ISA)
    sizes = EXPERTS, 64, 160, fmt, 1
    assert layer.packed_bytes == sum(native.packed_bytes(*sizes, gated=False)) < 0.7 * three.packed_bytes
    assert three.packed_bytes == sum(native.packed_bytes(*sizes))
    assert layer.canonical_bytes("gate_proj") == 0 and list(layer.slices()[0].matrices) == list(NAMES)
    again = empty_layer(64, 160, fmt, swiglu=RELU2)
    assert len(again.missing()) == 2 * EXPERTS
    for expert, name in again.missing():
        again.import_packed(expert, name, layer.export_packed(expert, name))
    x, index, weights = (tensor.detach() for tensor in inputs_for(TAILS[1], 64))
    assert torch.equal(*(each.forward(x, index, weights, None, "none")[0] for each in (layer, again)))
    kinds = [LayerKind.of(each, 2, None).row_flops for each in (layer, three)]
    assert kinds[0] * 3 == kinds[1] * 2


@pytest.mark.parametrize("activation", ["retain", "recompute"])
def test_planned_memory_is_what_calls_take(activation: str) -> None:
    ranks = dict.fromkeys(NAMES, 8)
    given = {"ranks": ranks, "rows": 400, "experts": EXPERTS, "threads": 1, "nodes": 1, "activation": activation}
    two, three = (native.layer_memory(64, 160, **given, gated=gated) for gated in (False, True))
    assert two.workspace <= three.workspace
    layer = make(64, 160, "bf16", ISA)
    x, index, weights = (tensor.detach() for tensor in inputs_for((80, 80, 80, 80, 80), 64))
    _, saved = layer.forward(x, index, weights, lora_of(64, 160, 8), activation)
    assert saved.bytes <= two.retained * 1.1
    if activation == "retain":
        assert 0 < two.retained < 0.7 * three.retained


def test_a_gate_that_experts_lack_is_refused() -> None:
    layer = empty_layer(32, 64, "bf16", swiglu=RELU2, biases=True)
    with pytest.raises(ValueError, match="these experts have no gate"):
        layer.load(0, "gate_proj", torch.zeros(64, 32))
    with pytest.raises(ValueError, match=r"its shape is \[64\], the model's config says \[0\]"):
        layer.load_bias(0, "gate_proj", torch.zeros(64))
    full = make(32, 64, "bf16", ISA)
    x, index, weights = (tensor.detach() for tensor in inputs_for((3, 0, 4, 0, 1), 32))
    with pytest.raises(ValueError, match="LoRA is on gate_proj, which these experts do not have"):
        full.forward(x, index, weights, make_lora(32, 64, 4, torch.float32), "none")
    assert SILU.projections == ("gate_proj", *NAMES)
