"""Attention of a decode step on the CPU: one token a request, over a paged KV cache; and the block around it."""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from ktft.native.dense import HostDense
from ktft.native.extension import core
from ktft.native.machine import Runtime

STEP = 16
"""What head_size and block_size are multiples of."""

MOST_HEAD_SIZE = 1024


@dataclass(frozen=True)
class AttentionSizes:
    """What a layer's attention has.

    Attributes:
        heads, kv_heads: of queries, and of keys and values; the first is a multiple of the second.
        head_size, block_size: multiples of `STEP`.

    Raises:
        ValueError: a size does not fit.
    """

    heads: int
    kv_heads: int
    head_size: int
    block_size: int

    def __post_init__(self) -> None:
        sizes = {"head_size": self.head_size, "block_size": self.block_size}
        if min(self.heads, self.kv_heads, *sizes.values()) < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"attention with {self.heads} heads, {self.kv_heads} of keys and values, and {sizes}; sizes are at "
                "least 1, and heads is a multiple of kv_heads"
            )
        for name, size in sizes.items():
            if size % STEP:
                raise ValueError(f"attention with a {name} of {size}; a multiple of {STEP} is needed")

    @property
    def block(self) -> tuple[int, int, int]:
        """The shape of a block of the KV cache."""
        return self.kv_heads, self.block_size, 2 * self.head_size


class KvCache:
    """A layer's part of a paged KV cache.

    Args:
        cache: bf16 `[blocks, kv_heads, block_size, 2 · head_size]`, where each head's part of a block is contiguous:
            keys `[head_size, block_size]`, then values `[block_size, head_size]`.
        pairs: whether they are laid out for AMX instead: keys `[block_size / 16, head_size / 2, 16, 2]`, tokens before
            columns, then values `[head_size / 16, block_size / 2, 16, 2]`, columns before tokens.

    Raises:
        ValueError: it is something else.
    """

    def __init__(self, cache: Tensor, pairs: bool = False) -> None:
        right = cache.dim() == 4 and cache.dtype == torch.bfloat16 and cache.device == _CPU
        if not right or cache.stride()[2:] != (cache.shape[3], 1):
            raise ValueError(
                "a KV cache is bf16 [blocks, kv_heads, block_size, 2 head_size] in CPU memory, where a head's part of "
                f"a block is contiguous, got {_described(cache)}"
            )
        self.block, self._cache = tuple(cache.shape[1:]), cache
        self.handle = core.KvCache(cache.data_ptr(), cache.stride(0), cache.stride(1), cache.shape[0], pairs)


class DecodeStep:
    """The requests of a step, each with one token, for any layer.

    Args:
        block_table: int32 `[requests, most blocks]`: the blocks of each context, in order.
        lengths: int32 `[requests]`: the tokens of each context, of which the request's own is the last.
        positions, slots: int64 `[requests]`, see `Heads.write`; None for attention alone.

    Raises:
        ValueError: a shape, a dtype or a stride is wrong.
    """

    def __init__(
        self, block_table: Tensor, lengths: Tensor, positions: Tensor | None = None, slots: Tensor | None = None
    ) -> None:
        self.requests = len(lengths)
        places = [each for each in (positions, slots) if each is not None]
        right = (
            block_table.dtype == lengths.dtype == torch.int32
            and block_table.dim() == 2
            and block_table.shape[0] == self.requests
            and block_table.stride(1) == 1
            and block_table.device == _CPU
            and _is_vector(lengths, self.requests, torch.int32)
            and all(_is_vector(each, self.requests, torch.int64) for each in places)
        )
        if not right:
            given = {"block_table": block_table, "lengths": lengths, "positions": positions, "slots": slots}
            raise ValueError(
                "a decode step has int32 block_table [requests, blocks] and lengths [requests], int64 positions and "
                "slots [requests], in CPU memory, got "
                + ", ".join(f"{name} {_described(each)}" for name, each in given.items() if each is not None)
            )
        self.places, self._tensors = len(places) == 2, (block_table, lengths, places)
        at = [each.data_ptr() for each in places] if self.places else (0, 0)
        table = block_table.data_ptr(), block_table.shape[1], block_table.stride(0)
        self.handle = core.DecodeStep(self.requests, *at, *table, lengths.data_ptr())


class Heads:
    """What lies between the product of queries, keys and values and attention: norms, rotary embedding, KV cache.

    Args:
        sizes: with heads of up to `MOST_HEAD_SIZE`.
        norms: bf16 `[head_size]` weights of the RMS norms of queries' and of keys' heads; None for none.
        epsilon: of the norms.
        rotations: bf16 `[positions, rotary]`: the cosines, then the sines, by which the halves of the first `rotary`
            columns of a head are rotated (GPT-NeoX); a multiple of `STEP`. None for none.

    Raises:
        ValueError: a size or a tensor does not fit.
    """

    def __init__(
        self,
        runtime: Runtime,
        sizes: AttentionSizes,
        norms: tuple[Tensor, Tensor] | None = None,
        epsilon: float = 0.0,
        rotations: Tensor | None = None,
    ) -> None:
        head_size = sizes.head_size
        if head_size > MOST_HEAD_SIZE:
            raise ValueError(f"heads of {head_size}; at most {MOST_HEAD_SIZE} are possible")
        for norm in norms or ():
            if norm.shape != (head_size,) or norm.dtype != torch.bfloat16 or norm.device != _CPU:
                raise ValueError(f"a norm of heads is bf16 [{head_size}] in CPU memory, got {_described(norm)}")
        if rotations is not None:
            rotary = rotations.shape[-1]
            fits = rotations.dim() == 2 and rotary % STEP == 0 and 0 < rotary <= head_size
            if not fits or rotations.dtype != torch.bfloat16 or rotations.device != _CPU:
                raise ValueError(
                    f"rotations are bf16 [positions, rotary] in CPU memory, with a multiple of {STEP} up to "
                    f"{head_size}, got {_described(rotations)}"
                )
            rotations = rotations.contiguous()
        self._runtime, self._kept = runtime, (norms and tuple(norm.contiguous() for norm in norms), rotations)
        self.sizes, self.width = sizes, (sizes.heads + 2 * sizes.kv_heads) * head_size
        at = [norm.data_ptr() for norm in self._kept[0] or ()] or (0, 0)
        turns = (0, 0, 0) if rotations is None else (rotations.data_ptr(), rotations.shape[1], rotations.shape[0])
        self.handle = core.Heads(*astuple(sizes), *at, epsilon, *turns)

    def write(self, qkv: Tensor, positions: Tensor, slots: Tensor, cache: KvCache) -> None:
        """Compute queries and keys in place, each operation rounded to bf16, and write keys and values to the cache.

        Args:
            qkv: contiguous bf16 `[tokens, (heads + 2 · kv_heads) · head_size]`: queries, keys and values.
            positions: int64 `[tokens]`, rows of `rotations`.
            slots: int64 `[tokens]`, block · block_size + place in it; negative for tokens that are not written.

        Raises:
            ValueError: a shape or a dtype is wrong, or there is no such position or slot.
        """
        tokens = len(qkv)
        right = qkv.shape == (tokens, self.width) and qkv.dtype == torch.bfloat16 and qkv.is_contiguous()
        vectors = all(_is_vector(each, tokens, torch.int64) for each in (positions, slots))
        if not (right and vectors and qkv.device == _CPU and cache.block == self.sizes.block):
            raise ValueError(
                f"heads are bf16 [tokens, {self.width}], with int64 positions and slots [tokens], for a KV cache "
                f"{list(self.sizes.block)} a block, got {_described(qkv)}, positions {_described(positions)}, slots "
                f"{_described(slots)} and {list(cache.block)}"
            )
        self.handle.write(
            self._runtime.handle, tokens, qkv.data_ptr(), positions.data_ptr(), slots.data_ptr(), cache.handle
        )


class DecodeAttention:
    """`softmax(scale · q Kᵀ) V` for one token of each request. Sums are fp32.

    Args:
        window: how many tokens of a context count, its last ones; 0 stands for all.
        sinks: `[heads]`, a score of each head that has no value.

    Raises:
        ValueError: a size does not fit.
    """

    def __init__(
        self,
        runtime: Runtime,
        sizes: AttentionSizes,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        heads = sizes.heads
        if window < 0:
            raise ValueError(f"attention with a window of {window}; it is at least 0")
        if sinks is not None and sinks.shape != (heads,):
            raise ValueError(f"attention with sinks {list(sinks.shape)} for {heads} heads; [{heads}] is needed")
        self._runtime, self.sizes = runtime, sizes
        self._queries, self.width = (heads, sizes.head_size), heads * sizes.head_size
        self._sinks = None if sinks is None else sinks.detach().to("cpu", torch.float32).contiguous()
        at = 0 if self._sinks is None else self._sinks.data_ptr()
        self.handle = core.DecodeAttention(*astuple(sizes), scale, window, at)

    def __call__(self, query: Tensor, cache: KvCache, step: DecodeStep, out: Tensor) -> Tensor:
        """Compute a step.

        Args:
            query: bf16 `[requests, heads, head_size]`, of which each request's part is contiguous.
            out: bf16 `[requests, heads, head_size]`, which is written.

        Returns:
            `out`.

        Raises:
            ValueError: a shape, a dtype or a stride is wrong; a context is empty, longer than its row of the table,
                or names a block that the cache does not have.
        """
        right = (
            query.shape == out.shape == (step.requests, *self._queries)
            and query.dtype == out.dtype == torch.bfloat16
            and query.stride()[1:] == (self._queries[1], 1)
            and out.is_contiguous()
            and cache.block == self.sizes.block
            and query.device == out.device == _CPU
        )
        if not right:
            raise ValueError(
                f"attention of bf16 queries {[step.requests, *self._queries]} in CPU memory over a KV cache "
                f"{list(self.sizes.block)} a block, got query {_described(query)}, out {_described(out)} and "
                f"{list(cache.block)}"
            )
        self.handle.run(
            self._runtime.handle, cache.handle, step.handle, query.data_ptr(), query.stride(0), out.data_ptr()
        )
        return out


class AttentionBlock:
    """Attention with its projections, for decode steps.

    Args:
        qkv, heads, attention, out: its parts, of the same heads and the same runtime.

    Raises:
        ValueError: the parts do not fit.
    """

    def __init__(self, qkv: HostDense, heads: Heads, attention: DecodeAttention, out: HostDense) -> None:
        fit = heads.sizes == attention.sizes and (qkv.shape[0], out.shape[1]) == (heads.width, attention.width)
        if not fit:
            raise ValueError(
                f"an attention block of heads {heads.sizes} and {attention.sizes} with projections "
                f"{list(qkv.shape)} and {list(out.shape)}, which do not fit"
            )
        self._runtime, self._parts = qkv.runtime, (qkv, heads, attention, out)
        self.hidden_sizes, self.block = (qkv.shape[1], out.shape[0]), heads.sizes.block
        self.handle = core.AttentionBlock(qkv.handle, heads.handle, attention.handle, out.handle)
        self._spare = self.handle.spare_elements

    def __call__(self, x: Tensor, cache: KvCache, step: DecodeStep) -> Tensor:
        """From hidden states, contiguous bf16 `[requests, hidden_size]`, to what is added to them, in the same shape.

        Raises:
            ValueError: as `Heads.write` and `DecodeAttention` do, or the step has no positions and slots.
        """
        requests, (size, out_size) = step.requests, self.hidden_sizes
        right = x.shape == (requests, size) and x.dtype == torch.bfloat16 and x.is_contiguous()
        if not (right and x.device == _CPU and step.places and cache.block == self.block):
            raise ValueError(
                f"an attention block takes bf16 [{requests}, {size}] in CPU memory, a step with positions and "
                f"slots and a KV cache {list(self.block)} a block, got {_described(x)} and {list(cache.block)}"
            )
        spare = torch.empty(requests * self._spare, dtype=torch.bfloat16)
        out = torch.empty(requests, out_size, dtype=torch.bfloat16)
        at = x.data_ptr(), spare.data_ptr(), out.data_ptr()
        self.handle.run(self._runtime.handle, cache.handle, step.handle, *at)
        return out


def _is_vector(tensor: Tensor, count: int, dtype: torch.dtype) -> bool:
    return tensor.shape == (count,) and tensor.dtype == dtype and tensor.is_contiguous() and tensor.device == _CPU


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} {tensor.stride()} on {tensor.device}"


_CPU = torch.device("cpu")
