"""Few tokens without a backward, with or without adapters: all experts in one phase (csrc/moe/few_rows.cc)."""

from __future__ import annotations

import pytest
import torch
from contract import (
    CASES,
    GPT_OSS,
    OUTPUT_TOLERANCE,
    dequantized,
    emulation_in_full,
    gated_oracle,
    make_gated,
    make_layer,
    make_lora,
    random_inputs,
    relative,
    small_lora,
)
from torch import Tensor

from ktft import native, reference
from ktft.config import PROJECTIONS
from ktft.native import ELSEWHERE, ExpertLayer

THREADS = 4  # so many that no task is a whole expert: takes_whole_experts in csrc/moe/few_rows.cc
ORDERS = pytest.mark.parametrize("threads", [THREADS, 2], ids=["strips", "whole experts"])
FORMAT_OF = {"amx_emu": "k4"}
# Others are faster by the GEMM (kMostDotTokens in csrc/kernels/few_tokens-inl.h)
BY_GEMM = [("amx_emu", "bf16"), ("amx_bf16", "bf16"), ("avx512_bf16", "bf16"), ("avx512_bf16", "fp8")]
STRIP_CASES = [case for case in CASES if case not in BY_GEMM]
ISAS = [(isa, FORMAT_OF.get(isa, "int8")) for isa in native.isas()]


def phases(layer: ExpertLayer) -> dict[str, float]:
    return layer.runtime.take_phases()


def forward(layer: ExpertLayer, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The output, which one phase must have computed."""
    phases(layer)
    out, _ = layer.forward(x, index, weights, None, "none")
    assert list(phases(layer)) == ["few rows"]
    return out


@ORDERS
@pytest.mark.parametrize(("isa", "fmt"), emulation_in_full(STRIP_CASES))
def test_every_format(isa: str, fmt: str, threads: int) -> None:
    for hidden, intermediate in ((32, 96), (160, 448)):
        layer = make_layer(hidden, intermediate, fmt, isa, threads)
        for tokens in (1, 2, 5):
            given = random_inputs(tokens, hidden, 2, seed=tokens)
            error = relative(forward(layer, *given), reference.moe(given[0].float(), *given[1:], *dequantized(layer)))
            assert error < OUTPUT_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@ORDERS
@pytest.mark.parametrize(("isa", "fmt"), ISAS)
def test_other_dtypes_biases_and_another_activation(isa: str, fmt: str, threads: int, dtype: torch.dtype) -> None:
    layer = make_gated(96, 160, fmt, isa, threads, swiglu=GPT_OSS)
    x, index, weights = random_inputs(3, 96, 2, dtype=dtype)
    out = forward(layer, x, index, weights)
    assert out.dtype == dtype
    expected = gated_oracle(layer)(x.bfloat16().float(), index, weights, *dequantized(layer), None)
    assert relative(out, expected) < OUTPUT_TOLERANCE


@ORDERS
def test_experts_elsewhere_and_tokens_without_any(threads: int) -> None:
    layer = make_layer(64, 96, "int8", native.default_isa(), threads)
    x, index, weights = random_inputs(4, 64, 2)
    index[1], index[2, 0] = ELSEWHERE, ELSEWHERE
    x[1] = torch.nan  # padding: nobody reads it
    out = forward(layer, x, index, weights)
    assert not out[1].any()
    here = index >= 0
    clean = x.where(here.any(1)[:, None], 0).float()
    expected = reference.moe(clean, index.clamp(min=0), weights * here, *dequantized(layer))
    assert relative(out, expected) < OUTPUT_TOLERANCE


@ORDERS
def test_one_expert_with_many_of_the_rows(threads: int) -> None:
    layer = make_layer(64, 96, "k4", native.default_isa(), threads)
    x, _, weights = random_inputs(6, 64, 2)
    index = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 4], [0, 1], [0, 2]])
    out = forward(layer, x, index, weights)
    assert relative(out, reference.moe(x.float(), index, weights, *dequantized(layer))) < OUTPUT_TOLERANCE


@ORDERS
def test_the_same_bits_again_and_nan_is_an_error(threads: int) -> None:
    layer = make_layer(160, 96, "k4", native.default_isa(), threads)
    x, index, weights = random_inputs(3, 160, 2)
    first = forward(layer, x, index, weights)
    for _ in range(20):
        assert torch.equal(forward(layer, x, index, weights), first)
    x[2, 7] = torch.inf
    with pytest.raises(ValueError, match="hidden states hold NaN or Inf"):
        layer.forward(x, index, weights, None, "none")
    x[2, 7] = 0
    forward(layer, x, index, weights)


@ORDERS
@pytest.mark.parametrize("ranks", [(16,), (4, 40, 17)])
@pytest.mark.parametrize(("isa", "fmt"), [*ISAS, (native.default_isa(), "k4")])
def test_each_token_has_its_own_adapter(isa: str, fmt: str, ranks: tuple[int, ...], threads: int) -> None:
    """Of other ranks and projections, and some tokens have none."""
    layer = make_layer(160, 448, fmt, isa, threads)
    names = [PROJECTIONS, ("down_proj", "up_proj"), ("gate_proj",)]
    loras = [make_lora(160, 448, r, torch.float32, which) for r, which in zip(ranks, names, strict=False)]
    kept = [layer.keep_lora(lora) for lora in loras]
    for tokens in (1, 2, 5):
        x, index, weights = random_inputs(tokens, 160, 2, seed=tokens)
        of = torch.arange(tokens) % (len(ranks) + 1) - int(tokens > 1)
        phases(layer)
        out, again = (layer.forward_adapters(x, index, weights, kept, of) for _ in range(2))
        assert list(phases(layer)) == ["few rows"]
        assert torch.equal(out, again)
        for adapter in of.unique().tolist():
            lora = loras[adapter] if adapter >= 0 else None
            expected = reference.moe(x.float(), index, weights, *dequantized(layer), lora)
            assert relative(out[of == adapter], expected[of == adapter]) < OUTPUT_TOLERANCE, (tokens, adapter)
        assert len(set(of.tolist())) == min(tokens, len(ranks) + 1)


@ORDERS
@torch.no_grad()
def test_adapters_with_biases_another_activation_and_experts_elsewhere(threads: int) -> None:
    layer = make_gated(96, 160, "mxfp4", native.default_isa(), threads, swiglu=GPT_OSS)
    lora = small_lora(96, 160, 20, torch.float32)
    x, index, weights = random_inputs(4, 96, 2)
    index[1], index[2, 0] = ELSEWHERE, ELSEWHERE
    phases(layer)
    out = layer.forward_adapters(x, index, weights, [layer.keep_lora(lora)], torch.tensor([0, 0, 0, -1]))
    assert list(phases(layer)) == ["few rows"]
    here = index >= 0
    call = x.float(), index.clamp(min=0), weights * here, *dequantized(layer)
    assert relative(out[:3], gated_oracle(layer)(*call, lora)[:3]) < OUTPUT_TOLERANCE
    assert relative(out[3], gated_oracle(layer)(*call, None)[3]) < OUTPUT_TOLERANCE


@pytest.mark.parametrize("what", ["backward", "LoRA", "many rows", "nodes"])
def test_other_calls_take_other_ways(what: str) -> None:
    layer = make_layer(64, 256, "k4", native.default_isa(), THREADS, nodes=2 if what == "nodes" else 1)
    lora = make_lora(64, 256, 4, torch.float32) if what == "LoRA" else None
    x, index, weights = random_inputs(80 if what == "many rows" else 2, 64, 2)
    phases(layer)
    layer.forward(x, index, weights, lora, "recompute" if what == "backward" else "none")
    found = phases(layer)
    assert found and "few rows" not in found
