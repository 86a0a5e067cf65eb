"""activation_bits=8: int8 weights times int8 activations, against torch's emulation of the same quantization.

The codes are the emulation's own, apart from ties, so what is left is bf16 rounding: of h, which can move a code, and
of outputs. Against the exact layer the quantization itself counts, above all h's, whose largest values are far from
the others.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from contract import dequantized, empty_layer, inputs_for, make_layer, make_lora, relative
from torch import Tensor

from ktft import native, reference
from ktft.lora import ExpertLora

EMULATION_TOLERANCE, EXACT_TOLERANCE = 0.01, 0.03
ISAS = ["amx_emu", *(["amx_bf16"] if "amx_bf16" in native.isas() and native.cpu_features()["amx_int8"] else [])]
SIZES = [(32, 96), (160, 32), (96, 1120), (1120, 160)]
ROWS = [(1, 3, 16, 0, 17), (33, 65, 0, 1, 3)]


def forward(layer: native.ExpertLayer, x: Tensor, index: Tensor, weights: Tensor, lora: ExpertLora | None = None):
    return layer.forward(x.detach(), index, weights.detach(), lora, "none", activation_bits=8)[0]


def quantized(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round() * scale, 0.0)


def emulated(layer: native.ExpertLayer, x, index, weights, nodes: int = 1, lora: ExpertLora | None = None) -> Tensor:
    """The layer in fp64 products of quantized values; every NUMA node quantizes its own columns of h."""
    units = -(-layer.intermediate_size // 128)
    nodes = min(nodes, units)
    cuts = [min(units * n // nodes * 128, layer.intermediate_size) for n in range(nodes + 1)]
    x, matrices = x.detach().bfloat16().double(), [m.double() for m in dequantized(layer)]

    def adapter(name: str, expert: int, rows: Tensor) -> Tensor | float:
        if lora is None or name not in lora.pairs:
            return 0.0
        pair = lora.pairs[name]
        return rows @ pair.a[expert].detach().double().T @ pair.b[expert].detach().double().T * pair.scaling

    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert, (gate, up, down) in enumerate(zip(*matrices, strict=True)):
        token, slot = torch.where(index == expert)
        rows = x[token]
        g, u = (
            quantized(rows) @ w.T + adapter(name, expert, rows) for w, name in ((gate, "gate_proj"), (up, "up_proj"))
        )
        h = (F.silu(g) * u).bfloat16().double()
        codes = torch.cat([quantized(h[:, a:b]) for a, b in itertools.pairwise(cuts)], -1)
        y = codes @ down.T + adapter("down_proj", expert, h)
        out.index_add_(0, token, y * weights.detach().double()[token, slot, None])
    return out


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("isa", ISAS)
def test_emulation_and_exact_layer(isa: str, threads: int, nodes: int) -> None:
    for hidden, intermediate in SIZES:
        layer = make_layer(hidden, intermediate, "int8", isa, threads, nodes)
        for rows in ROWS:
            x, index, weights = inputs_for(rows, hidden)
            out = forward(layer, x, index, weights)
            assert relative(out, emulated(layer, x, index, weights, nodes)) <= EMULATION_TOLERANCE
            exact = reference.moe(x.detach().float(), index, weights.detach(), *dequantized(layer), None)
            assert 0.002 <= relative(out, exact) <= EXACT_TOLERANCE, (hidden, intermediate, rows)


@pytest.mark.parametrize("isa", ISAS)
def test_many_rows(isa: str) -> None:
    """More than one call takes; and tokens that L2 does not hold, over more than one reduction block."""
    for hidden, intermediate, rows in ((96, 160, 760), (1568, 32, 700)):
        layer = make_layer(hidden, intermediate, "int8", isa, 2)
        x, index, weights = inputs_for((rows, 0, 0, 0, 0), hidden)
        out = forward(layer, x, index, weights)
        assert relative(out, emulated(layer, x, index, weights)) <= EMULATION_TOLERANCE


@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("up_proj",), ("down_proj",)])
@pytest.mark.parametrize("isa", ISAS)
def test_adapters_stay_exact(isa: str, names: tuple[str, ...]) -> None:
    for hidden, intermediate, rank, nodes in ((96, 160, 8, 1), (160, 288, 33, 2)):
        layer = make_layer(hidden, intermediate, "int8", isa, 2, nodes)
        lora = make_lora(hidden, intermediate, rank, torch.float32, names)
        x, index, weights = inputs_for(ROWS[1], hidden)
        out = forward(layer, x, index, weights, lora)
        assert relative(out, emulated(layer, x, index, weights, nodes, lora)) <= EMULATION_TOLERANCE
        exact = reference.moe(x.detach().float(), index, weights.detach(), *dequantized(layer), lora)
        assert relative(out, exact.detach()) <= EXACT_TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtypes_and_zero_tokens(dtype: torch.dtype) -> None:
    layer = make_layer(96, 64, "int8", ISAS[0], 2)
    x, index, weights = inputs_for(ROWS[0], 96, dtype)
    x = x.detach()
    x[2] = 0
    x[3] *= 0.1
    out = forward(layer, x, index, weights)
    assert out.dtype == dtype and not out[2].any()
    expected = emulated(layer, x, index, weights)
    assert relative(out, expected) <= EMULATION_TOLERANCE
    assert relative(out[3], expected[3]) <= EMULATION_TOLERANCE  # a token's scale is its own
    empty = torch.zeros(0, 2)
    assert forward(layer, x[:0], empty.long(), empty).shape == (0, 96)


def test_same_bits_whatever_the_threads_and_beside_other_calls() -> None:
    x, index, weights = inputs_for(ROWS[1], 96)
    outs = []
    for threads in (1, 2, 3):
        layer = make_layer(96, 160, "int8", ISAS[0], threads)
        outs.append(forward(layer, x, index, weights))
        exact = layer.forward(x.detach(), index, weights.detach(), None, "none")[0]  # shares the workspace
        assert 0.002 <= relative(outs[0], exact) <= EXACT_TOLERANCE
        outs.append(forward(layer, x, index, weights))
    assert all(torch.equal(outs[0], out) for out in outs[1:])


def test_what_cannot_be_is_refused() -> None:
    layer = make_layer(64, 64, "int8", ISAS[0])
    x, index, weights = (t.detach() for t in inputs_for(ROWS[0], 64))
    with pytest.raises(ValueError, match=r"format is bf16.*need int8 or a 4-bit format.*activation_bits at 16"):
        forward(make_layer(64, 64, "bf16", ISAS[0]), x, index, weights)
    with pytest.raises(ValueError, match=r"the ISA is scalar.*need avx512_bf16 or tiles.*activation_bits at 16"):
        forward(make_layer(64, 64, "int8", "scalar"), x, index, weights)
    for activation in ("retain", "recompute"):
        with pytest.raises(ValueError, match=rf'activation is {activation}.*activation="none"'):
            layer.forward(x, index, weights, None, activation, activation_bits=8)
    with pytest.raises(ValueError, match="activation_bits is 4, it must be 16"):
        layer.forward(x, index, weights, None, "none", activation_bits=4)
    wide = 133_152  # 127 * 127 of it exceed 2^31
    long = empty_layer(wide, 32, "int8", ISAS[0], num_experts=1)
    with pytest.raises(ValueError, match=f"sums over {wide} products.*activation_bits at 16"):
        forward(long, torch.zeros(1, wide), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
    x[1, 5] = float("nan")
    with pytest.raises(ValueError, match=r"NaN or Inf \(token 1 of"):
        forward(layer, x, index, weights)
