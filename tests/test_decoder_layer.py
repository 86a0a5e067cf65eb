"""A decoder layer in one call is its parts, one after the other, to the bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ktft import native
from ktft.native.attention import AttentionBlock, AttentionSizes, DecodeAttention, DecodeStep, Heads, KvCache
from ktft.native.decoder import DecoderLayer, MoeBlock
from ktft.native.dense import HostDense, pack_dense
from ktft.native.norm import HostNorm
from ktft.native.routing import choose_experts

SIZE, EXPERTS, TOP_K, REQUESTS = 64, 32, 3, 5
SIZES = AttentionSizes(4, 2, 16, 16)


@dataclass
class Parts:
    norms: tuple[HostNorm, HostNorm]
    attention: AttentionBlock
    router: HostDense
    experts: native.ExpertLayer
    chosen: Tensor

    def block(self, renormalize: bool = True) -> MoeBlock:
        return MoeBlock(self.router, self.experts, TOP_K, renormalize, self.chosen)

    def layer(self) -> DecoderLayer:
        return DecoderLayer(self.norms[0], self.attention, self.norms[1], self.block())

    def mixed(self, x: Tensor, renormalize: bool = True) -> tuple[Tensor, Tensor]:
        """What the experts give, and their numbers."""
        weights, chosen = choose_experts(self.router.runtime, self.router.product(x), TOP_K, renormalize)
        return self.experts.forward(x, chosen, weights, None, "none")[0], chosen


@pytest.fixture(params=native.isas())
def parts(request: pytest.FixtureRequest) -> Parts:
    runtime = native.runtime(isa=request.param, threads=2)
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.2).bfloat16()

    def dense(rows: int, columns: int) -> HostDense:
        return HostDense(runtime, "bf16", pack_dense(runtime, "bf16", drawn(rows, columns)), (rows, columns))

    heads = Heads(runtime, SIZES, (drawn(16), drawn(16)), 1e-5, drawn(64, 16))
    attention = AttentionBlock(dense(128, SIZE), heads, DecodeAttention(runtime, SIZES, 0.25), dense(SIZE, 64))
    experts = native.ExpertLayer(
        runtime, num_experts=EXPERTS, hidden_size=SIZE, intermediate_size=32, format="int8", name="layer 7"
    )
    for expert in range(EXPERTS):
        for projection, shape in (("gate_proj", (32, SIZE)), ("up_proj", (32, SIZE)), ("down_proj", (SIZE, 32))):
            experts.load(expert, projection, drawn(*shape))
    norms = HostNorm(runtime, drawn(SIZE), 1e-6), HostNorm(runtime, drawn(SIZE), 1e-5)
    return Parts(norms, attention, dense(EXPERTS, SIZE), experts, torch.zeros(EXPERTS, dtype=torch.int64))


def step_and_cache() -> tuple[DecodeStep, KvCache, Tensor]:
    """Requests at the ends of contexts of several lengths, whose tokens before are in the cache."""
    generator = torch.Generator().manual_seed(4)
    lengths = torch.tensor([1, 16, 17, 30, 48], dtype=torch.int32)
    table = torch.randperm(15, generator=generator).view(REQUESTS, 3).to(torch.int32)
    last = lengths.long() - 1
    slots = table[torch.arange(REQUESTS), last // 16].long() * 16 + last % 16
    cache = torch.randn(15, 2, 16, 32, generator=generator).bfloat16()
    return DecodeStep(table, lengths, last, slots), KvCache(cache), cache


def states(seed: int) -> Tensor:
    return torch.randn(REQUESTS, SIZE, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("renormalize", [True, False])
def test_router_and_experts(parts: Parts, renormalize: bool) -> None:
    block = parts.block(renormalize)
    expected, chosen = parts.mixed(states(1), renormalize)
    assert torch.equal(block(states(1)), expected) and torch.equal(block(states(1)), expected)
    assert parts.chosen.tolist() == (2 * chosen.flatten().bincount(minlength=EXPERTS)).tolist()
    assert block.seconds > 0


@pytest.mark.parametrize("first", [False, True])
def test_layer(parts: Parts, first: bool) -> None:
    (step, kept_in, written), (_, other, expected_cache) = step_and_cache(), step_and_cache()
    x, residual = states(1), None if first else states(2)
    sums = states(1) if residual is None else residual.clone()
    before, after = parts.norms
    attended = parts.attention(before(x, None if first else sums), other, step)
    expected, _ = parts.mixed(after(attended, sums))
    layer = parts.layer()
    out, left = layer(x, residual, kept_in, step)
    assert torch.equal(out, expected) and torch.equal(left, sums)
    assert torch.equal(written, expected_cache) and not torch.equal(written, step_and_cache()[2])
    assert left is (x if first else residual)


def test_refusals(parts: Parts) -> None:
    step, cache, _ = step_and_cache()
    layer, block = parts.layer(), parts.block()
    cases: list[tuple[Any, Any]] = [
        (states(1).float(), states(2)),
        (states(1)[:, 1:], states(2)),
        (states(1), states(2)[1:]),
        (states(1).T.contiguous().T, states(2)),
    ]
    for x, residual in cases:
        with pytest.raises(ValueError, match=r"layer 7: a decoder layer takes contiguous bf16 \[5, 64\]"):
            layer(x, residual, cache, step)
    with pytest.raises(ValueError, match="a step with positions and slots"):
        layer(states(1), None, cache, DecodeStep(*step._tensors[:2]))
    with pytest.raises(ValueError, match=r"layer 7: a router takes contiguous bf16 \[tokens, 64\]"):
        block(states(1).float())
    with pytest.raises(ValueError, match=r"layer 7.*NaN"):
        block(states(1).fill_(torch.nan))
    with pytest.raises(ValueError, match=r"layer 7: a router \[32, 64\] that chooses 33 does not fit 32 experts"):
        MoeBlock(parts.router, parts.experts, EXPERTS + 1, True, parts.chosen)
    with pytest.raises(ValueError, match=r"layer 7: chosen is int64 \[32\] in CPU memory, got \[31\]"):
        MoeBlock(parts.router, parts.experts, TOP_K, True, parts.chosen[1:])
    wide = HostNorm(parts.router.runtime, torch.ones(2 * SIZE, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(ValueError, match=r"layer 7: norms of 128 and 64 and attention \(64, 64\) do not fit experts"):
        DecoderLayer(wide, parts.attention, parts.norms[1], block)
