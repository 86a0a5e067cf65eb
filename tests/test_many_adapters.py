"""Several adapters in one forward, each token with its own or none, compared with the reference adapter by adapter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from contract import (
    CASES,
    EXPERTS,
    OUTPUT_TOLERANCE,
    biases,
    dequantized,
    emulation_in_full,
    inputs_for,
    make_layer,
    make_lora,
    random_inputs,
    relative,
    small_lora,
)
from torch import Tensor

from ktft import native, reference
from ktft.lora import ExpertLora
from ktft.native import ELSEWHERE
from ktft.swiglu import Swiglu

# Nodes and threads: one thread does the experts one by one, several do all of them phase by phase
WAYS = [(1, 1), (1, 2), (2, 2)]
ROWS = [(1, 3, 7, 0, 9), (0, 33, 64, 65, 2), (257, 1, 0, 0, 300), (2, 1, 1, 0, 0)]


def made(hidden: int, intermediate: int, ranks: Sequence[int]) -> list[ExpertLora]:
    """Adapters of these ranks; the last one has LoRA on down alone."""
    names = ("gate_proj", "up_proj", "down_proj")
    loras = [make_lora(hidden, intermediate, rank, torch.float32, names) for rank in ranks[:-1]]
    return [*loras, make_lora(hidden, intermediate, ranks[-1], torch.bfloat16, names[2:])]


def by_reference(
    layer: native.ExpertLayer, x: Tensor, index: Tensor, weights: Tensor, loras: Sequence[ExpertLora], of: Tensor
) -> Tensor:
    """Each adapter's tokens, computed alone."""
    out, own = torch.zeros_like(x), biases(layer) if layer.biases else None
    for adapter in of.unique().tolist():
        rows = of == adapter
        lora = None if adapter < 0 else loras[adapter]
        here = index[rows] >= 0
        inputs = x[rows].float(), index[rows].where(here, 0), weights[rows].where(here, 0), *dequantized(layer)
        out[rows] = reference.moe(*inputs, lora, layer.swiglu, own).to(x.dtype)
    return out


EMULATED = ("amx_emu", "bf16"), ("amx_emu", "k4")
# Emulated tiles are slow, and test_kernels.py has each format of them: two are enough to have each adapter's rows
FORMATS_AND_ISAS = [
    pytest.param(*each.values, marks=[*each.marks, *[pytest.mark.full] * (each.values not in EMULATED)])
    if each.values[0] == "amx_emu"
    else each
    for each in emulation_in_full(CASES)
]


@pytest.mark.parametrize(("isa", "fmt"), FORMATS_AND_ISAS)
@torch.no_grad()
def test_each_token_gets_its_own_adapter(isa: str, fmt: str) -> None:
    """Ranks differ, one adapter lacks projections, and some tokens have none."""
    for nodes, threads in WAYS:
        hidden, intermediate = (96, 64) if nodes == 1 else (64, 256)
        layer = make_layer(hidden, intermediate, fmt, isa, threads, nodes)
        loras = made(hidden, intermediate, (16, 1, 33, 8))
        kept = [layer.keep_lora(lora) for lora in loras]
        for rows in ROWS:
            x, index, weights = inputs_for(rows, hidden)
            of = torch.randint(-1, len(loras), (len(x),), generator=torch.Generator().manual_seed(1))
            expected = by_reference(layer, x, index, weights, loras, of)
            got = layer.forward_adapters(x, index, weights, kept, of)
            assert relative(got, expected) < OUTPUT_TOLERANCE
            for adapter in of.unique().tolist():  # a wrong adapter for few tokens would be lost in the whole
                assert relative(got[of == adapter], expected[of == adapter]) < 2 * OUTPUT_TOLERANCE


@pytest.mark.parametrize("threads", [1, 2])
@torch.no_grad()
def test_one_adapter_for_all_gives_what_forward_gives(threads: int) -> None:
    layer = make_layer(96, 64, "int8", threads=threads)
    lora = make_lora(96, 64, 8, torch.float32)
    x, index, weights = inputs_for((40, 3, 7, 0, 90), 96)
    kept, other = layer.keep_lora(lora), layer.keep_lora(make_lora(96, 64, 4, torch.float32))
    for adapters, of in (([kept], 0), ([other, kept], 1)):
        got = layer.forward_adapters(x, index, weights, adapters, torch.full((len(x),), of))
        assert torch.equal(got, layer.forward(x, index, weights, lora, "none")[0])
    got = layer.forward_adapters(x, index, weights, [kept], torch.full((len(x),), -1, dtype=torch.int32))
    assert torch.equal(got, layer.forward(x, index, weights, None, "none")[0])
    got = layer.forward_adapters(x, index, weights, [], torch.full((len(x),), -1))
    assert torch.equal(got, layer.forward(x, index, weights, None, "none")[0])


@torch.no_grad()
def test_a_token_does_not_depend_on_the_adapters_of_others() -> None:
    """Beside other adapters it is what it is beside tokens without one, but for the order of a sum in fp32."""
    layer = make_layer(96, 64, "k4", threads=2)
    loras = made(96, 64, (16, 4, 8, 2))
    kept = [layer.keep_lora(lora) for lora in loras]
    x, index, weights = random_inputs(64, 96)
    of = torch.arange(64) % 5 - 1
    together = layer.forward_adapters(x, index, weights, kept, of)
    for adapter in range(-1, 4):
        alone = layer.forward_adapters(x, index, weights, kept, of.where(of == adapter, -1))
        assert relative(together[of == adapter], alone[of == adapter]) < OUTPUT_TOLERANCE / 4
        assert relative(together[of != adapter], alone[of != adapter]) > OUTPUT_TOLERANCE


@torch.no_grad()
def test_clamps_biases_and_experts_elsewhere() -> None:
    swiglu = Swiglu(alpha=1.702, limit=1.5, shift=1.0)
    layer = make_layer(64, 96, "mxfp4", threads=1, swiglu=swiglu, biases=True)
    for expert in range(EXPERTS):
        for name in layer.projections:
            layer.load_bias(expert, name, torch.randn(64 if name == "down_proj" else 96))
    loras = [small_lora(64, 96, rank, torch.float32) for rank in (4, 20)]
    x, index, weights = random_inputs(37, 64)
    index[:, 1] = ELSEWHERE
    of = torch.arange(37) % 3 - 1
    got = layer.forward_adapters(x, index, weights, [layer.keep_lora(lora) for lora in loras], of)
    assert relative(got, by_reference(layer, x, index, weights, loras, of)) < OUTPUT_TOLERANCE


@torch.no_grad()
def test_eight_bit_activations() -> None:
    """They round more, so the adapters are compared with the same call for each adapter alone."""
    layer = make_layer(128, 64, "int8", "amx_emu", threads=1)
    loras = [make_lora(128, 64, rank, torch.float32) for rank in (4, 20, 16)]
    kept = [layer.keep_lora(lora) for lora in loras]
    x, index, weights = random_inputs(21, 128)
    of = torch.arange(21) % 4 - 1
    got = layer.forward_adapters(x, index, weights, kept, of, 8)
    for adapter in range(-1, 3):
        alone = layer.forward(x, index, weights, loras[adapter] if adapter >= 0 else None, "none", 8)[0]
        assert relative(got[of == adapter], alone[of == adapter]) < OUTPUT_TOLERANCE


def test_what_does_not_fit_is_refused() -> None:
    layer, other = make_layer(64, 96, "bf16"), make_layer(64, 96, "bf16")
    kept = layer.keep_lora(make_lora(64, 96, 4, torch.float32))
    x, index, weights = random_inputs(3, 64)
    for adapters, of, message in (
        ([kept], torch.tensor([0, 1, 0]), "token 1 has adapter 1, there are 1"),
        ([kept], torch.tensor([0, -2, 0]), "token 1 has adapter -2"),
        ([kept], torch.tensor([0, 0]), r"integers \[3\], got \[2\]"),
        ([kept], torch.zeros(3), r"integers \[3\], got \[3\] torch.float32"),
        ([other.keep_lora(make_lora(64, 96, 4, torch.float32))], torch.zeros(3, dtype=torch.int32), "not kept by this"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.forward_adapters(x, index, weights, adapters, of)
    with pytest.raises(ValueError, match="dropout 0.5"):
        layer.keep_lora(make_lora(64, 96, 4, torch.float32, dropout=0.5))
    with pytest.raises(ValueError, match="no projection has one"):
        layer.keep_lora(ExpertLora({}))
    with pytest.raises(ValueError, match="LoRA A is"):
        layer.keep_lora(make_lora(96, 64, 4, torch.float32))
    nothing = layer.forward_adapters(x[:0], index[:0], weights[:0], [kept], torch.zeros(0, dtype=torch.int32))
    assert nothing.shape == (0, 64)
