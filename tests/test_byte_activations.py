"""activation_bits=8 with 4-bit formats: rows are rounded to int8, with a scale for each token and 32 columns.

AVX2 and AVX-512 BF16 do so for any number of tokens, AMX for up to six, the others for few; AVX-512 BF16 does so for
many rows of int8, of which few are multiplied exactly.

Products are compared with those of rows that torch rounds the same way. What is left is the rounding of outputs to
bf16.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from contract import CASES, OUTPUT_TOLERANCE, dequantized, make_layer, make_lora, random_inputs, relative
from test_dense_product import SHAPES, decoded, dense_product
from torch import Tensor

from ktft import native
from ktft.lora import ExpertLora
from ktft.native.dense import pack_dense

CODES = "k4", "int4", "mxfp4"
ROUNDING = [(isa, fmt) for isa, fmt in CASES if isa != "scalar" and fmt in CODES]
ALWAYS = [isa for isa in ("avx2", "avx512_bf16") if isa in native.isas()]
MOST = {isa: rows for isa, rows in (("avx512_bf16", 8), ("amx_bf16", 6)) if isa in native.isas()}
BYTES = "avx512_bf16"
needs_bytes = pytest.mark.skipif(BYTES not in native.isas(), reason="the CPU has no AVX-512 BF16")
OTHERS = [("scalar", "k4"), *((native.default_isa(), fmt) for fmt in ("int8", "fp8"))]
THREADS = 4  # as in test_few_rows.py
LAYER_TOLERANCE = 0.01  # the rounding of h to bf16 can move a code


def rounded(x: Tensor) -> Tensor:
    groups = x.float().unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (groups / scale).round() * scale, 0.0).flatten(-2)


def uneven(tokens: int, cols: int) -> Tensor:
    """Values with a few that are 30 times the others, and a group of zeros."""
    x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(tokens))
    x[:, 5::37] *= 30
    x[-1, :32] = 0
    return x.bfloat16()


@pytest.mark.parametrize(("isa", "fmt"), ROUNDING)
def test_product(isa: str, fmt: str) -> None:
    runtime = native.runtime(isa=isa, threads=2)
    for shape in SHAPES:
        packed = pack_dense(runtime, fmt, torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        weight = decoded(fmt, packed, shape)
        for tokens in (1, 2, 3, 4) if shape[1] > 32 else (2, 3, 4):
            x = uneven(tokens, shape[1])
            found = dense_product(runtime, fmt, packed, shape, x, None, 8)
            assert relative(found, rounded(x) @ weight.T) < OUTPUT_TOLERANCE
            assert relative(found, x.float() @ weight.T) > OUTPUT_TOLERANCE
        for tokens in (5, 6, 7, 12, 13, 33, 128, 150):
            x = uneven(tokens, shape[1])
            found = dense_product(runtime, fmt, packed, shape, x, None, 8)
            if isa in ALWAYS or tokens <= MOST.get(isa, 0):
                assert relative(found, rounded(x) @ weight.T) < OUTPUT_TOLERANCE
            elif tokens <= 12:  # it depends on format and ISA
                assert min(relative(found, rows @ weight.T) for rows in (x.float(), rounded(x))) < OUTPUT_TOLERANCE
            else:
                assert torch.equal(found, dense_product(runtime, fmt, packed, shape, x))


@needs_bytes
def test_product_of_int8() -> None:
    runtime = native.runtime(isa=BYTES, threads=2)
    for shape in SHAPES:
        packed = pack_dense(runtime, "int8", torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        weight = decoded("int8", packed, shape)
        for tokens in (1, 5, 12, 13, 33, 150):
            x = uneven(tokens, shape[1])
            found = dense_product(runtime, "int8", packed, shape, x, None, 8)
            rows = x.float() if tokens <= 12 else rounded(x)
            assert relative(found, rows @ weight.T) < OUTPUT_TOLERANCE


@torch.no_grad()
@needs_bytes
def test_layer_of_int8() -> None:
    layer, lora = make_layer(160, 448, "int8", BYTES, 2), make_lora(160, 448, 16, torch.float32)
    x, index, weights = random_inputs(100, 160, 2)
    for adapter in (None, lora):
        found = layer.forward(x, index, weights, adapter, "none", activation_bits=8)[0]
        assert relative(found, emulated(layer, x, index, weights, [adapter] * 100)) < LAYER_TOLERANCE


@pytest.mark.parametrize(("isa", "fmt"), [*((isa, "k4") for isa in ALWAYS), *((isa, "int8") for isa in ALWAYS[1:])])
def test_same_bits_whatever_the_threads_and_long_sums(isa: str, fmt: str) -> None:
    shape = 96, 1120  # more than two reduction blocks
    weight, x = torch.randn(shape), uneven(140, 1120)
    runtimes = [native.runtime(isa=isa, threads=threads) for threads in (1, 3)]
    packed = pack_dense(runtimes[0], fmt, weight)
    found = [dense_product(runtime, fmt, packed, shape, x, None, 8) for runtime in runtimes]
    assert torch.equal(*found)
    assert relative(found[0], rounded(x) @ decoded(fmt, packed, shape).T) < OUTPUT_TOLERANCE
    x[3, 40] = torch.inf
    broken = dense_product(runtimes[0], fmt, packed, shape, x, None, 8)
    assert broken[3].isnan().all() and torch.equal(broken[:3], found[0][:3])


@pytest.mark.parametrize(("isa", "fmt"), OTHERS)
def test_other_products_stay_as_they_are(isa: str, fmt: str) -> None:
    runtime = native.runtime(isa=isa, threads=2)
    packed, x = pack_dense(runtime, fmt, torch.randn(96, 160)), uneven(3, 160)
    assert torch.equal(*(dense_product(runtime, fmt, packed, (96, 160), x, None, bits) for bits in (8, 16)))


def emulated(
    layer: native.ExpertLayer, x: Tensor, index: Tensor, weights: Tensor, loras: list[ExpertLora | None]
) -> Tensor:
    """The layer with rounded rows; LoRA, each token's own, is that of rows that are not rounded."""
    out, matrices = torch.zeros(x.shape), dequantized(layer)
    names = "gate_proj", "up_proj", "down_proj"
    for token, (lora, experts) in enumerate(zip(loras, index.tolist(), strict=True)):

        def product(place: int, expert: int, row: Tensor, lora: ExpertLora | None = lora) -> Tensor:
            y = rounded(row) @ matrices[place][expert].float().T
            if lora is not None:
                pair = lora.pairs[names[place]]
                y = y + row.float() @ pair.a[expert].detach().T @ pair.b[expert].detach().T * pair.scaling
            return y

        for expert, weight in zip(experts, weights[token], strict=True):
            gate, up = (product(place, expert, x[token].bfloat16()) for place in (0, 1))
            out[token] += weight * product(2, expert, (F.silu(gate) * up).bfloat16())
    return out


@pytest.mark.parametrize(("isa", "fmt"), ROUNDING)
def test_layer(isa: str, fmt: str) -> None:
    layer = make_layer(160, 448, fmt, isa, THREADS)
    kept = [make_lora(160, 448, rank, torch.float32) for rank in (16, 5)]
    for tokens in (1, 3):
        x, index, weights = random_inputs(tokens, 160, 2, seed=tokens)
        given = x.detach(), index, weights.detach()
        layer.runtime.take_phases()
        found = layer.forward(*given, None, "none", activation_bits=8)[0]
        of = torch.arange(tokens) % 3 - 1 if tokens > 1 else torch.tensor([1])
        adapted = layer.forward_adapters(*given, [layer.keep_lora(each) for each in kept], of, 8)
        assert list(layer.runtime.take_phases()) == ["few rows"]
        assert relative(found, emulated(layer, *given, [None] * tokens)) < LAYER_TOLERANCE
        chosen = [None if adapter < 0 else kept[adapter] for adapter in of.tolist()]
        assert relative(adapted, emulated(layer, *given, chosen)) < LAYER_TOLERANCE
        assert relative(found, layer.forward(*given, None, "none")[0]) > 0.005


@pytest.mark.parametrize("fmt", CODES)
@pytest.mark.parametrize("isa", MOST)
def test_layer_of_several_rows_an_expert(isa: str, fmt: str) -> None:
    layer = make_layer(160, 448, fmt, isa, THREADS)
    tokens = 2 * MOST[isa] + 1  # fewer rows an expert than that
    x, index, weights = random_inputs(tokens, 160, 2)
    given = x.detach(), index, weights.detach()
    layer.runtime.take_phases()
    found = layer.forward(*given, None, "none", activation_bits=8)[0]
    assert list(layer.runtime.take_phases()) == ["few rows"]
    assert relative(found, emulated(layer, *given, [None] * tokens)) < LAYER_TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("isa", sorted({isa for isa, _ in ROUNDING}))
def test_many_rows_with_lora_and_nan_is_an_error(isa: str) -> None:
    layer, lora = make_layer(160, 448, "k4", isa, 2), make_lora(160, 448, 16, torch.float32)
    x, index, weights = random_inputs(100, 160, 2)
    for adapter in (None, lora):
        found, exact = (layer.forward(x, index, weights, adapter, "none", activation_bits=bits)[0] for bits in (8, 16))
        if isa in ALWAYS:
            assert relative(found, emulated(layer, x, index, weights, [adapter] * 100)) < LAYER_TOLERANCE
        else:
            assert torch.equal(found, exact)
    x[2, 7] = torch.nan
    with pytest.raises(ValueError, match="hidden states hold NaN or Inf"):
        layer.forward(x[:3], index[:3], weights[:3], None, "none", activation_bits=8)
