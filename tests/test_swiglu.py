"""Experts with biases, a clamped activation or GELU, held to the same contract as SiLU's."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from contract import (
    CASES,
    GPT_OSS,
    SIZES,
    TAILS,
    TIGHT,
    assert_contract,
    compare,
    dequantized,
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
from torch.nn import functional

from ktft import native, reference
from ktft.config import PROJECTIONS
from ktft.model.autograd import routed_experts
from ktft.swiglu import GELU_TANH, SILU, Swiglu, clamped_after


@in_every_way([case for case in CASES if case[1] in ("bf16", "int8", "mxfp4")])
def test_contract(isa: str, fmt: str, nodes: int, threads: int, activation: str) -> None:
    for hidden, intermediate, rank, rows in SIZES[nodes]:
        layer = make_gated(hidden, intermediate, fmt, isa, threads, nodes)
        lora = small_lora(hidden, intermediate, rank, torch.float32)
        assert_contract(compare(layer, lora, *inputs_for(rows, hidden), activation, gated_oracle(layer)))


@pytest.mark.parametrize("fmt", [fmt for fmt in native.FORMATS if fmt not in ("bf16", "int8", "mxfp4")])
def test_other_formats(fmt: str) -> None:
    layer = make_gated(64, 160, fmt, native.default_isa(), 2, 2, GPT_OSS)
    lora = make_lora(64, 160, 8, torch.float32)
    assert_contract(compare(layer, lora, *inputs_for(TAILS[1], 64), oracle=gated_oracle(layer)))


@pytest.mark.parametrize("isa", emulation_in_full(native.isas()))
@pytest.mark.parametrize(
    ("swiglu", "has_biases"),
    [
        (SILU, True),
        (GPT_OSS, False),
        (GPT_OSS, True),
        (Swiglu(limit=0.5), False),
        (GELU_TANH, False),
        (replace(GELU_TANH, limit=1.7), True),
        (clamped_after(0.8), False),
    ],
)
def test_biases_and_activation_apart(isa: str, swiglu: Swiglu, has_biases: bool) -> None:
    layer = (make_gated if has_biases else make_layer)(64, 96, "int8", isa, swiglu=swiglu)
    for lora in (None, small_lora(64, 96, 4, torch.float32), small_lora(64, 96, 4, torch.float32, ("up_proj",))):
        assert_contract(compare(layer, lora, *inputs_for(TAILS[1], 64), oracle=gated_oracle(layer)))


def test_the_formula_is_that_of_the_models() -> None:
    gate, up = torch.linspace(-6, 6, 101).double(), torch.linspace(4, -4, 101).double()
    eye = torch.eye(101).double()[None]

    def h(swiglu: Swiglu) -> torch.Tensor:
        """The activation alone: one token for each pair of gate and up."""
        one = torch.ones(101, 1)
        x = torch.cat((torch.diag(gate), torch.diag(up)), 1)
        first, second = torch.cat((eye, 0 * eye), 2), torch.cat((0 * eye, eye), 2)
        down = torch.cat((eye, 0 * eye), 1)
        return reference.moe(x, one.long() * 0, one, first, second, down, swiglu=swiglu)[:, :101].diagonal()

    torch.testing.assert_close(h(GELU_TANH), functional.gelu(gate, approximate="tanh") * up, check_dtype=False)
    expected = functional.silu(gate).clamp(max=3) * up.clamp(-3, 3)
    torch.testing.assert_close(h(clamped_after(3.0)), expected, check_dtype=False)
    assert clamped_after(math.inf) == SILU


@pytest.mark.parametrize("isa", native.isas())
@pytest.mark.parametrize("swiglu", [GELU_TANH, clamped_after(2.0)])
def test_contract_of_other_activations(isa: str, swiglu: Swiglu) -> None:
    for hidden, intermediate, rank, rows in SIZES[2]:
        for fmt in ("bf16", "k4"):
            layer = make_layer(hidden, intermediate, fmt, isa, 2, 2, swiglu=swiglu)
            lora = small_lora(hidden, intermediate, rank, torch.float32)
            assert_contract(compare(layer, lora, *inputs_for(rows, hidden), "recompute", gated_oracle(layer)))


def test_what_is_clamped_has_no_gradient() -> None:
    """One token and one expert, whose gates and ups are all far beyond the limit: only routing learns."""
    layer = empty_layer(32, 32, "bf16", num_experts=1, swiglu=TIGHT, biases=True)
    for name in PROJECTIONS:
        layer.load(0, name, torch.eye(32))
        layer.load_bias(0, name, torch.full((32,), 0.0 if name == "down_proj" else 50.0))
    x = torch.randn(1, 32, requires_grad=True)
    weights = torch.ones(1, 1, requires_grad=True)
    routed_experts(layer, x, torch.zeros(1, 1, dtype=torch.long), weights).sum().backward()
    assert not x.grad.any()
    h = TIGHT.limit * torch.sigmoid(torch.tensor(TIGHT.alpha * TIGHT.limit)) * (TIGHT.limit + 1)
    assert weights.grad.item() == pytest.approx(32 * h.item(), rel=0.01)


@pytest.mark.parametrize("nodes", [2, 3])
def test_down_bias_is_added_once(nodes: int) -> None:
    layer = empty_layer(32, 288, "bf16", threads=2, nodes=nodes, num_experts=1, biases=True)
    expected = torch.randn(32)
    for name in PROJECTIONS:
        layer.load(0, name, torch.zeros(32, 288) if name == "down_proj" else torch.zeros(288, 32))
        layer.load_bias(0, name, expected if name == "down_proj" else torch.zeros(288))
    out = routed_experts(layer, torch.ones(3, 32), torch.zeros(3, 1, dtype=torch.long), torch.full((3, 1), 0.5))
    torch.testing.assert_close(out, (expected * 0.5).expand(3, 32), rtol=0.01, atol=0)


@pytest.mark.parametrize("isa", emulation_in_full(native.isas()))
def test_same_bits_whatever_the_threads_and_the_policy(isa: str) -> None:
    results = []
    for threads, activation in ((1, "retain"), (2, "recompute"), (3, "retain")):
        layer = make_gated(64, 96, "int8", isa, threads)
        torch.manual_seed(1)
        lora = small_lora(64, 96, 33, torch.float32, dropout=0.1, seed=11)
        x, index, weights = inputs_for(TAILS[1], 64)
        out = routed_experts(layer, x, index, weights, lora, activation)
        leaves = [x, weights, *lora.parameters()]
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("nodes", [1, 2])
def test_8_bit_activations(nodes: int) -> None:
    """W8A8 has the same epilogue: its error is what it is without biases, about 1 to 3%."""
    isas = [isa for isa in native.isas() if isa.startswith("amx")] or ["amx_emu"]
    layer = make_gated(64, 160, "int8", isas[-1], nodes, nodes)
    lora = small_lora(64, 160, 4, torch.float32)
    x, index, weights = (tensor.detach() for tensor in inputs_for(TAILS[1], 64))
    out, _ = layer.forward(x, index, weights, lora, "none", activation_bits=8)
    expected = gated_oracle(layer)(x.float(), index, weights, *dequantized(layer), lora)
    assert relative(out, expected) < 0.03


def test_bad_biases_are_named() -> None:
    runtime = native.runtime(1)
    shape = {"num_experts": 2, "hidden_size": 32, "intermediate_size": 64, "format": "bf16"}
    plain, layer = native.ExpertLayer(runtime, **shape), native.ExpertLayer(runtime, **shape, biases=True)
    bias, nan = torch.zeros(64), torch.zeros(64).index_fill(0, torch.tensor(3), float("nan"))
    for call, message in (
        (lambda: plain.load_bias(0, "up_proj", bias), "made without biases"),
        (lambda: plain.bias(0, "up_proj"), "has no biases"),
        (lambda: layer.bias(2, "up_proj"), "expert 2 does not exist"),
        (lambda: layer.load_bias(0, "up_proj", torch.zeros(32)), r"\[32\], the model's config says \[64\]"),
        (lambda: layer.load_bias(0, "up_proj", nan), r"NaN or Inf, for instance at \[3\]"),
        (lambda: layer.load_bias(2, "up_proj", bias), "expert 2 does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    layer.load_bias(0, "up_proj", bias)
    with pytest.raises(ValueError, match=r"bias of experts\.0\.up_proj was loaded already"):
        layer.load_bias(0, "up_proj", bias)
    layer.load(0, "up_proj", torch.zeros(64, 32))
    assert (0, "up_proj") not in layer.missing() and len(layer.missing()) == 5
    for swiglu in (Swiglu(limit=0.0), Swiglu(alpha=-1.0), Swiglu(gate_limit=0.0)):
        with pytest.raises(ValueError, match="all must be positive"):
            native.ExpertLayer(runtime, **shape, swiglu=swiglu)
