"""Calls that pass to the CPU's experts and back through host memory: on a GPU, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import contract
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from hot import ISA
from interpreted import DEVICE, bf16_in_the_interpreter

from ktft import reference
from ktft.checkpoint.routing_profile import Routing
from ktft.native import ELSEWHERE
from ktft.native.hybrid import HostExpertsError
from ktft.serve.runtime import triton_handover, triton_resident
from ktft.serve.runtime.hybrid_experts import HybridModel

__all__ = ["bf16_in_the_interpreter"]

HIDDEN, INTERMEDIATE, TOP_K = 160, 96, 3


@pytest.fixture(params=[0, 3])
def model(request: pytest.FixtureRequest) -> Iterator[HybridModel]:
    """Two layers, of which so many experts are resident."""
    layers = {n: contract.make_layer(HIDDEN, INTERMEDIATE, "k4", ISA, name=f"layers.{n}") for n in (1, 4)}
    tokens = [float(e < request.param) for e in range(contract.EXPERTS)]
    made = HybridModel(
        layers,
        DEVICE,
        top_k=TOP_K,
        dtype=torch.bfloat16,
        gpu_expert_memory=2 << 20 if request.param else 0,
        routing=Routing({n: tokens for n in layers}) if request.param else None,
        max_lora_rank=16,
        max_adapters=2,
    )
    made.ops, made.handover = triton_resident, triton_handover
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_layers_output(model: HybridModel, dtype: torch.dtype) -> None:
    for number, tokens in ((1, 1), (4, 3), (1, 2)):
        x, index, weights = contract.random_inputs(tokens, HIDDEN, TOP_K, seed=tokens)
        index[0, 1] = ELSEWHERE
        experts = model.layers[number]
        found = experts(x.to(DEVICE), index.to(DEVICE, dtype), weights.to(DEVICE))
        model.check()
        counted = index.where(index != ELSEWHERE, 0), weights.where(index != ELSEWHERE, 0)
        expected = reference.moe(x.float(), *counted, *contract.dequantized(experts.layer), None)
        assert found.dtype == torch.bfloat16
        assert contract.relative(found.cpu().float(), expected) < contract.OUTPUT_TOLERANCE


def test_each_token_has_its_own_adapter(model: HybridModel) -> None:
    """A step of the base alone, which follows, finds nothing of it."""
    lora = contract.make_lora(HIDDEN, INTERMEDIATE, 5, torch.float32)
    model.add_adapter(7, {1: lora}, {})
    for numbers in ([7, 0, 7], [0, 0, 0]):
        model.step.set(numbers, model.adapters)
        for number in (1, 4):
            experts, given = model.layers[number], contract.random_inputs(3, HIDDEN, TOP_K, seed=number)
            found = experts(*(each.to(DEVICE) for each in given)).cpu().float()
            model.check()
            for token, adapter in enumerate(numbers):
                one = lora if adapter and number == 1 else None
                call = given[0].float(), *given[1:], *contract.dequantized(experts.layer)
                expected = reference.moe(*call, one)[token]
                assert contract.relative(found[token], expected) < 2 * contract.OUTPUT_TOLERANCE


def test_pairs_are_counted_once(model: HybridModel) -> None:
    _, index, _ = given = contract.random_inputs(4, HIDDEN, TOP_K)
    model.heat.clear()
    model.layers[4](*(each.to(DEVICE) for each in given))
    assert model.heat.totals()[1] == torch.bincount(index.flatten(), minlength=contract.EXPERTS).tolist()


def test_an_error_of_the_cpu_is_raised(model: HybridModel) -> None:
    x, index, weights = contract.random_inputs(2, HIDDEN, TOP_K)
    model.layers[1](x.to(DEVICE) * torch.nan, index.to(DEVICE), weights.to(DEVICE))
    with pytest.raises(HostExpertsError, match=r"layers\.1: hidden states hold NaN or Inf"):
        model.check()


def test_other_calls_are_refused_before_anything_is_written(model: HybridModel) -> None:
    x, index, weights = contract.random_inputs(2, HIDDEN, TOP_K)
    for given, wrong in ((index[:, :2], weights), (index, weights[:, :2])):
        with pytest.raises(ValueError, match=rf"layers\.1: top_k_\w+ must be contiguous \[2, {TOP_K}\]"):
            model.layers[1](*(each.to(DEVICE) for each in (x, given, wrong)))
