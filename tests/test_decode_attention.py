"""Attention of a decode step and its block, compared with torch's in fp32 over the same keys and values."""

from __future__ import annotations

import pytest
import torch
from contract import CASES, relative
from torch import Tensor

from ktft import native
from ktft.native.attention import AttentionBlock, AttentionSizes, DecodeAttention, DecodeStep, Heads, KvCache
from ktft.native.dense import HostDense, pack_dense

ISAS = sorted({isa for isa, _ in CASES})
LENGTHS = (1, 15, 16, 17, 128, 129, 300, 1100)  # parts of a group, a piece and a block, and several parts of a context
SMALL = AttentionSizes(4, 2, 32, 32)
TOLERANCE = 4e-3  # outputs are bf16


def placed(keys: Tensor, values: Tensor, pairs: bool = False) -> Tensor:
    """A block's keys and values `[kv_heads, block_size, head_size]` as the cache has them."""
    heads, block, size = keys.shape
    if pairs:
        keys = keys.reshape(heads, -1, 16, size // 2, 2).transpose(2, 3)
        values = values.reshape(heads, block // 2, 2, -1, 16).permute(0, 3, 1, 4, 2)
    else:
        keys = keys.transpose(1, 2)
    return torch.cat((keys.reshape(heads, -1), values.reshape(heads, -1)), 1).view(heads, block, 2 * size)


class Contexts:
    """Requests with contexts of some lengths in a cache, whose other places hold NaN."""

    def __init__(
        self,
        lengths: tuple[int, ...],
        heads: int = 4,
        kv_heads: int = 2,
        size: int = 32,
        block: int = 32,
        pairs: bool = False,
    ) -> None:
        self.pairs = pairs
        generator = torch.Generator().manual_seed(7)
        counts = [-(-length // block) for length in lengths]
        order = torch.randperm(sum(counts) + 3, generator=generator).to(torch.int32).split([*counts, 3])
        self.table = torch.full((len(lengths), max(counts) + 1), -1, dtype=torch.int32)
        self.cache = torch.full((sum(counts) + 3, kv_heads, block, 2 * size), torch.nan, dtype=torch.bfloat16)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.query = torch.randn(len(lengths), heads, size, generator=generator).bfloat16()
        self.keys, self.values = [], []
        for row, length, count, blocks in zip(self.table, lengths, counts, order, strict=False):
            row[:count] = blocks
            whole = torch.full((2, kv_heads, count * block, size), torch.nan)
            whole[:, :, :length] = torch.randn(2, kv_heads, length, size, generator=generator)
            keys, values = whole.bfloat16()
            for number, part, of in zip(blocks, keys.split(block, 1), values.split(block, 1), strict=True):
                self.cache[number] = placed(part, of, pairs)
            self.keys.append(keys[:, :length].float())
            self.values.append(values[:, :length].float())

    def expected(self, scale: float, window: int = 0, sinks: Tensor | None = None) -> Tensor:
        outs = []
        for query, keys, values in zip(self.query.float(), self.keys, self.values, strict=True):
            share = query.shape[0] // keys.shape[0]
            keys, values = (each[:, -window:].repeat_interleave(share, 0) for each in (keys, values))
            scores = scale * torch.einsum("hd,htd->ht", query, keys)
            if sinks is not None:
                scores = torch.cat((scores, sinks[:, None]), 1)
            outs.append(torch.einsum("ht,htd->hd", scores.softmax(1)[:, : keys.shape[1]], values))
        return torch.stack(outs)

    def run(self, attention: DecodeAttention) -> Tensor:
        out = torch.full(self.query.shape, torch.nan, dtype=torch.bfloat16)
        return attention(self.query, KvCache(self.cache, self.pairs), DecodeStep(self.table, self.lengths), out)


each_layout = pytest.mark.parametrize("pairs", [False, True])


@each_layout
@pytest.mark.parametrize("isa", ISAS)
def test_attention(isa: str, pairs: bool) -> None:
    for threads, heads, kv_heads, size, block in (
        (1, 4, 2, 32, 32),
        (3, 16, 1, 80, 16),
        (2, 7, 7, 128, 128),
        (2, 13, 1, 64, 256),
    ):
        contexts = Contexts(LENGTHS, heads, kv_heads, size, block, pairs)
        runtime = native.runtime(isa=isa, threads=threads)
        found = contexts.run(DecodeAttention(runtime, AttentionSizes(heads, kv_heads, size, block), size**-0.5))
        assert relative(found, contexts.expected(size**-0.5)) < TOLERANCE


@each_layout
def test_one_long_context_in_parts_with_a_window_and_sinks(pairs: bool) -> None:
    runtime, sinks = native.runtime(threads=3), torch.tensor([0.5, -40.0, 9.0, 2.0])
    for lengths in ((3000,), (700, 3, 1500)):
        contexts = Contexts(lengths, pairs=pairs)
        for window in (0, 1, 50, 51, 1300):
            for sink in (None, sinks):
                found = contexts.run(DecodeAttention(runtime, SMALL, 0.3, window, sink))
                assert relative(found, contexts.expected(0.3, window, sink)) < TOLERANCE, (lengths, window)


def test_large_scores_stay_finite() -> None:
    contexts = Contexts((40, 600))
    contexts.query *= 300
    found = contexts.run(DecodeAttention(native.runtime(threads=2), SMALL, 1.0))
    assert relative(found, contexts.expected(1.0)) < TOLERANCE


@each_layout
@pytest.mark.parametrize("isa", ISAS)
def test_nan_stays(isa: str, pairs: bool) -> None:
    """One NaN in a query, a key or a value: of the heads that read it, and of no others."""
    size, block = 32, 16
    for lengths, at in (((5,), 4), ((40,), 17), ((600,), 333)):
        for place in ("query", "key", "value"):
            contexts = Contexts(lengths, 4, 2, size, block, pairs)
            if place == "query":
                contexts.query[0, 1, 3] = torch.nan
            else:
                number = int(contexts.table[0, at // block])
                keys, values = torch.zeros(2, 2, block, size)
                (keys if place == "key" else values)[1, at % block] = torch.nan
                contexts.cache[number] += placed(keys, values, pairs).bfloat16()
            runtime = native.runtime(isa=isa, threads=2)
            found = contexts.run(DecodeAttention(runtime, AttentionSizes(4, 2, size, block), 0.3)).isnan()[0]
            heads = [head in ((1,) if place == "query" else (2, 3)) for head in range(4)]
            assert found.any(1).tolist() == found.all(1).tolist() == heads, (place, lengths)


def test_parts_of_larger_tensors() -> None:
    """A layer's blocks in a cache of several layers, and queries between keys and values."""
    contexts = Contexts((90, 20))
    contexts.query = torch.cat([contexts.query, torch.ones_like(contexts.query)], 1)[:, :4]
    shared = torch.full((contexts.cache.shape[0], 3, *contexts.cache.shape[1:]), torch.nan, dtype=torch.bfloat16)
    shared[:, 1] = contexts.cache
    contexts.cache = shared[:, 1]
    found = contexts.run(DecodeAttention(native.runtime(threads=2), SMALL, 0.2))
    assert relative(found, contexts.expected(0.2)) < TOLERANCE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 4, 32)}, r"query torch.float32 \[2, 4, 32\]"),
        ({"query": torch.zeros(3, 4, 32, dtype=torch.bfloat16)}, r"query torch.bfloat16 \[3, 4, 32\]"),
        ({"cache": torch.zeros(4, 2, 32, 32, dtype=torch.bfloat16)}, r"and \[2, 32, 32\]"),
        ({"cache": torch.zeros(4, 2, 32, 64)}, r"got torch.float32 \[4, 2, 32, 64\]"),
        ({"cache": torch.zeros(4, 2, 64, 32, dtype=torch.bfloat16).mT}, r"got torch.bfloat16 \[4, 2, 32, 64\]"),
        ({"lengths": torch.tensor([3])}, "lengths torch.int64"),
        ({"lengths": torch.tensor([3, 0], dtype=torch.int32)}, "request 1 has a context of 0 tokens"),
        ({"lengths": torch.tensor([97, 3], dtype=torch.int32)}, "for 1 to 96"),
        ({"table": torch.tensor([[0, 1, 2], [5, 0, 0]], dtype=torch.int32)}, "block 5 of a KV cache of 5"),
    ],
)
def test_refusals(change: dict[str, Tensor], message: str) -> None:
    contexts = Contexts((40, 20))
    contexts.cache, contexts.table = contexts.cache[:5], torch.zeros(2, 3, dtype=torch.int32)
    for name, tensor in change.items():
        setattr(contexts, name, tensor)
    with pytest.raises(ValueError, match=message):
        contexts.run(DecodeAttention(native.runtime(threads=1), SMALL, 0.2))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 3, 32, 32), "multiple of kv_heads"),
        ((4, 2, 40, 32), "head_size of 40"),
        ((4, 2, 32, 24), "block_size of 24"),
    ],
)
def test_sizes_that_do_not_fit(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionSizes(*sizes)


class Block:
    """A block with random weights, and the same in torch."""

    def __init__(self, norms: bool, rotary: int, heads: int = 4, kv_heads: int = 2, size: int = 48) -> None:
        generator = torch.Generator().manual_seed(11)
        self.heads, self.kv_heads, self.size, self.rotary, self.hidden = heads, kv_heads, size, rotary, 96

        def drawn(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=generator) / 8).bfloat16()

        self.qkv, self.out = drawn((heads + 2 * kv_heads) * size, self.hidden), drawn(self.hidden, heads * size)
        self.bias = drawn(len(self.qkv)).float()
        self.norms = (1 + drawn(size), 1 + drawn(size)) if norms else None
        angles = torch.arange(64)[:, None] * 0.7 ** torch.arange(rotary // 2)
        self.turns = torch.cat((angles.cos(), angles.sin()), 1).bfloat16() if rotary else None

    def native(self, isa: str, threads: int = 2, block: int = 16) -> tuple[Heads, AttentionBlock]:
        runtime = native.runtime(isa=isa, threads=threads)
        sizes = AttentionSizes(self.heads, self.kv_heads, self.size, block)
        heads = Heads(runtime, sizes, self.norms, 1e-5, self.turns)
        qkv, out = (
            HostDense(runtime, "bf16", pack_dense(runtime, "bf16", weight), tuple(weight.shape), bias)
            for weight, bias in ((self.qkv, self.bias), (self.out, None))
        )
        return heads, AttentionBlock(qkv, heads, DecodeAttention(runtime, sizes, 0.2), out)

    def prepared(self, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[tokens, heads, size]` from the product's rows, each operation rounded to bf16."""
        parts = rows.view(len(rows), -1, self.size).split([self.heads, self.kv_heads, self.kv_heads], 1)
        done = []
        for part, norm in zip(parts, (*(self.norms or (None, None)), None), strict=True):
            x = part.float()
            if norm is not None:
                x = (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.float()).bfloat16().float()
            if self.turns is not None and len(done) < 2:
                cos, sin = self.turns[positions].float()[:, None].chunk(2, -1)
                first, second, rest = x.split([self.rotary // 2, self.rotary // 2, self.size - self.rotary], -1)
                x = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
            done.append(x.bfloat16())
        return done[0], done[1], done[2]


@each_layout
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("norms", "rotary"), [(True, 48), (True, 32), (False, 16), (False, 0)])
def test_block(isa: str, norms: bool, rotary: int, pairs: bool) -> None:
    """Prompts whose tokens are written at once, then a token of each request through the whole block."""
    block, lengths = Block(norms, rotary), (1, 16, 40)
    heads, whole = block.native(isa)
    generator = torch.Generator().manual_seed(5)
    table = torch.randperm(12, generator=generator).view(3, 4).to(torch.int32)
    cache = torch.full((12, block.kv_heads, 16, 2 * block.size), torch.nan, dtype=torch.bfloat16)
    kept_in = KvCache(cache, pairs)
    x, expected = [], []
    for row, length in zip(table, lengths, strict=True):
        states = torch.randn(length, block.hidden, generator=generator).bfloat16()
        at, rows = torch.arange(length), (states.float() @ block.qkv.float().T + block.bias).bfloat16()
        q, k, v = block.prepared(rows, at)
        slots = row[at // 16].long() * 16 + at % 16
        if length > 1:
            written = rows[:-1].clone()
            slots[0], first = -1, slots[0].item()  # a token that is not kept, then the same again
            heads.write(written, at[:-1], slots[:-1], kept_in)
            kept = cache[first // 16].view(block.kv_heads, 32, block.size)[:, 16:]
            if pairs:
                kept = kept.view(block.kv_heads, -1, 8, 16, 2).permute(0, 2, 4, 1, 3).reshape(kept.shape)
            assert kept[:, first % 16].isnan().all() and not kept[:, first % 16 + 1].isnan().any()
            slots[0] = first
            heads.write(rows[:-1].clone(), at[:-1], slots[:-1], kept_in)
            assert relative(written.view(length - 1, -1, block.size)[:, : block.heads], q[:-1]) < TOLERANCE
        share = block.heads // block.kv_heads
        keys, values = (each.float().repeat_interleave(share, 1) for each in (k, v))
        weights = (0.2 * torch.einsum("hd,thd->ht", q[-1].float(), keys)).softmax(-1)
        found = torch.einsum("ht,thd->hd", weights, values).flatten().bfloat16().float()
        x.append(states[-1])
        expected.append(found @ block.out.float().T)
    last = torch.tensor(lengths) - 1
    slots = table[torch.arange(3), last // 16].long() * 16 + last % 16
    step = DecodeStep(table, torch.tensor(lengths, dtype=torch.int32), last, slots)
    assert relative(whole(torch.stack(x), kept_in, step), torch.stack(expected)) < 2 * TOLERANCE


def test_block_refusals() -> None:
    block = Block(True, 32)
    heads, whole = block.native(ISAS[0])
    cache = KvCache(torch.zeros(2, 2, 16, 96, dtype=torch.bfloat16))
    rows, one = torch.zeros(1, 384, dtype=torch.bfloat16), torch.ones(1, dtype=torch.int64)
    for position, slot, message in (
        (64, 0, "token 0 has position 64 of a rotary embedding for 64"),
        (-1, 0, "token 0 has position -1"),
        (0, 32, "token 0 has slot 32 of a KV cache of 2 blocks of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            heads.write(rows, one * position, one * slot, cache)
    with pytest.raises(ValueError, match=r"slots torch.int32 \[1\]"):
        heads.write(rows, one, one.int(), cache)
    with pytest.raises(ValueError, match=r"got torch.bfloat16 \[1, 383\]"):
        heads.write(rows[:, 1:], one, one, cache)
    table, x = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 96, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="a step with positions and slots"):
        whole(x, cache, DecodeStep(table, one.int()))
    with pytest.raises(ValueError, match=r"got torch.bfloat16 \[1, 95\]"):
        whole(x[:, 1:], cache, DecodeStep(table, one.int(), one, one))
    with pytest.raises(ValueError, match="which do not fit"):
        AttentionBlock(whole._parts[0], heads, whole._parts[2], whole._parts[0])
    with pytest.raises(ValueError, match="a multiple of 16 up to 48"):
        Heads(native.runtime(), AttentionSizes(4, 2, 48, 16), rotations=torch.zeros(4, 24, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"a norm of heads is bf16 \[48\]"):
        Heads(native.runtime(), AttentionSizes(4, 2, 48, 16), (torch.ones(48), torch.ones(48)))
