"""Rows of X in fixed point meet codes, as bytes (csrc/kernels/code_dots-inl.h) or words (word_gemm-inl.h)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from contract import (
    CASES,
    EXPERTS,
    OUTPUT_TOLERANCE,
    assert_contract,
    compare,
    dequantized,
    emulation_in_full,
    inputs_for,
    make_layer,
    make_lora,
    make_weights,
    relative,
)
from torch import Tensor

from ktft import native, reference
from ktft.model.autograd import routed_experts
from ktft.native.packed import PACKED_FORMATS

FORMATS = [name for name, form in PACKED_FORMATS.items() if form.values]  # those of 4 bits
BYTE_CASES = [(isa, fmt) for isa, fmt in CASES if fmt in FORMATS and isa != "scalar"]
# Tiles have products of their own for int8
BYTE_CASES += [(isa, fmt) for isa, fmt in CASES if fmt == "int8" and isa in ("avx2", "avx512", "avx512_bf16")]
WORD_CASES = [(isa, fmt) for isa, fmt in CASES if isa == "avx2" and fmt in ("k4", "int8")]
FEW = (1, 4, 0, 3, 2)
MORE = (5, 12, 0, 7, 8)  # AVX-512 without tiles: up to 12
MANY = (16, 37, 0, 5, 130)  # more than the 128 rows of a call's fixed-point memory
ROWS_CASES = [(*case, FEW) for case in BYTE_CASES] + [(*case, MANY) for case in WORD_CASES]
# Hidden and intermediate size: less than a tile's 128 columns, whole tiles, whole tiles and 1 to 3 groups of 32
SIZES = [(32, 96), (128, 256), (160, 448), (352, 192)]
each_case = pytest.mark.parametrize(("isa", "fmt", "rows"), emulation_in_full(ROWS_CASES))


def output_error(layer: native.ExpertLayer, x: Tensor, index: Tensor, weights: Tensor) -> float:
    with torch.no_grad():
        out = routed_experts(layer, x, index, weights)
        return relative(out, reference.moe(x.float(), index, weights, *dequantized(layer)))


@pytest.mark.parametrize("threads", [1, 2])
@each_case
def test_contract(isa: str, fmt: str, rows: tuple[int, ...], threads: int) -> None:
    for hidden, intermediate in SIZES:
        layer = make_layer(hidden, intermediate, fmt, isa, threads)
        for given in (MORE, rows):
            x, index, weights = inputs_for(given, hidden)
            assert output_error(layer, x, index, weights) < OUTPUT_TOLERANCE
    assert_contract(compare(layer, make_lora(hidden, intermediate, 8, torch.float32), x, index, weights))


@pytest.mark.parametrize("names", [("gate_proj",), ("up_proj",), ("down_proj",)])
@pytest.mark.parametrize("fmt", ["k4", "int8"])
@pytest.mark.parametrize("isa", emulation_in_full(sorted({native.default_isa(), "amx_emu"})))
def test_lora_on_one_projection(isa: str, fmt: str, names: tuple[str, ...]) -> None:
    layer = make_layer(160, 448, fmt, isa)
    assert_contract(compare(layer, make_lora(160, 448, 33, torch.float32, names), *inputs_for(FEW, 160)))


@each_case
def test_one_value_a_thousand_times_the_others(isa: str, fmt: str, rows: tuple[int, ...]) -> None:
    """Alone it decides the outputs; where its weights are zeros it must not cost the other groups their bits."""
    matrices = make_weights(352, 192)
    x, index, weights = inputs_for(rows, 352)
    x = x.detach().clone()
    x[:, 70] = 1000
    assert output_error(make_layer(352, 192, fmt, isa, weights=matrices), x, index, weights) < OUTPUT_TOLERANCE
    for (_, name), matrix in matrices.items():
        if name != "down_proj":
            matrix[:, 64:96] = 0
    assert output_error(make_layer(352, 192, fmt, isa, weights=matrices), x, index, weights) < OUTPUT_TOLERANCE


@pytest.mark.parametrize("sign", [torch.sign, torch.ones_like], ids=["signs", "all positive"])
@each_case
def test_the_largest_codes_and_values(
    isa: str, fmt: str, rows: tuple[int, ...], sign: Callable[[Tensor], Tensor]
) -> None:
    """All weights of a row of one size, so that every k4 group has sub = 64 and the largest code; x likewise.

    Where all are positive, exact sums are as large as they can be.
    """
    matrices = {key: sign(weight) * 0.05 for key, weight in make_weights(352, 192).items()}
    x, index, weights = inputs_for(rows, 352)
    x = sign(x.detach()) * 1.9921875  # of a power of two the largest bf16
    assert output_error(make_layer(352, 192, fmt, isa, weights=matrices), x, index, weights) < OUTPUT_TOLERANCE


@each_case
def test_groups_of_zeros_and_of_tiny_values(isa: str, fmt: str, rows: tuple[int, ...]) -> None:
    matrices = make_weights(352, 192)
    x, index, weights = inputs_for(rows, 352)
    x = x.detach().clone()
    x[:, 32:64] = 0
    x[:, 64:128] *= 1e-36
    for expert in range(EXPERTS):
        matrices[expert, "up_proj"][5] = 0  # a row: its outputs are exact zeros
        matrices[expert, "gate_proj"][:, 128:160] = 0
    layer = make_layer(352, 192, fmt, isa, weights=matrices)
    assert output_error(layer, x, index, weights) < OUTPUT_TOLERANCE
    zeros = routed_experts(layer, torch.zeros_like(x), index, weights)
    assert not zeros.any()


@pytest.mark.parametrize("value", [1e30, 3e38])
@each_case
def test_infinite_activations_are_not_lost(isa: str, fmt: str, rows: tuple[int, ...], value: float) -> None:
    layer = make_layer(160, 448, fmt, isa)
    x, index, weights = inputs_for(rows, 160)
    fine = routed_experts(layer, x, index, weights).detach()
    large = x.detach().clone()
    large[0] *= value / large[0].abs().max()  # gate times up is Inf
    out = routed_experts(layer, large, index, weights)
    assert not out[0].isfinite().any()
    assert torch.equal(out[1:], fine[1:])


@each_case
def test_same_bits_whatever_the_threads(isa: str, fmt: str, rows: tuple[int, ...]) -> None:
    for given in (rows, MORE):
        x, index, weights = inputs_for(given, 160)
        outs = [routed_experts(make_layer(160, 448, fmt, isa, threads), x, index, weights) for threads in (1, 2, 3)]
        assert all(torch.equal(outs[0], other) for other in outs[1:])
