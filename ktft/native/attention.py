"""Attention of a decode step on the CPU: one token a request, over a paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ktft.native.extension import core
from ktft.native.machine import Runtime

STEP = 16
"""What head_size and block_size are multiples of."""


class DecodeAttention:
    """`softmax(scale · q Kᵀ) V` for one token of each request. Sums are fp32.

    Args:
        heads, kv_heads: of queries, and of keys and values; the first is a multiple of the second.
        head_size, block_size: multiples of `STEP`.
        window: how many tokens of a context count, its last ones; 0 stands for all.
        sinks: `[heads]`, a score of each head that has no value.

    Raises:
        ValueError: a size does not fit.
    """

    def __init__(
        self,
        runtime: Runtime,
        heads: int,
        kv_heads: int,
        head_size: int,
        block_size: int,
        scale: float,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> None:
        sizes = {"head_size": head_size, "block_size": block_size}
        if min(heads, kv_heads, *sizes.values()) < 1 or heads % kv_heads or window < 0:
            raise ValueError(
                f"attention with {heads} heads, {kv_heads} of keys and values, {sizes} and a window of {window}; sizes "
                "are at least 1, and heads is a multiple of kv_heads"
            )
        for name, size in sizes.items():
            if size % STEP:
                raise ValueError(f"attention with a {name} of {size}; a multiple of {STEP} is needed")
        if sinks is not None and sinks.shape != (heads,):
            raise ValueError(f"attention with sinks {list(sinks.shape)} for {heads} heads; [{heads}] is needed")
        self._runtime, self._queries = runtime, (heads, head_size)
        self._block = kv_heads, block_size, 2 * head_size
        self._sinks = None if sinks is None else sinks.detach().to("cpu", torch.float32).contiguous()
        at = 0 if self._sinks is None else self._sinks.data_ptr()
        self._core = core.DecodeAttention(heads, kv_heads, head_size, block_size, scale, window, at)

    def __call__(self, query: Tensor, cache: Tensor, block_table: Tensor, lengths: Tensor, out: Tensor) -> Tensor:
        """Compute a step.

        Args:
            query: bf16 `[requests, heads, head_size]`, of which each request's part is contiguous.
            cache: bf16 `[blocks, kv_heads, block_size, 2 · head_size]`, where each head's part of a block is
                contiguous: keys `[head_size, block_size]`, then values `[block_size, head_size]`.
            block_table: int32 `[requests, most blocks]`: the blocks of each context, in order.
            lengths: int32 `[requests]`: the tokens of each context, of which the request's own is the last.
            out: bf16 `[requests, heads, head_size]`, which is written.

        Returns:
            `out`.

        Raises:
            ValueError: a shape, a dtype or a stride is wrong; a context is empty, longer than its row of the table,
                or names a block that the cache does not have.
        """
        requests, strides = query.shape[0], cache.stride()
        right = (
            query.shape[1:] == out.shape[1:] == self._queries
            and cache.shape[1:] == self._block
            and query.dtype == cache.dtype == out.dtype == torch.bfloat16
            and block_table.dtype == lengths.dtype == torch.int32
            and block_table.shape[0] == lengths.shape[0] == out.shape[0] == requests
            and query.stride()[1:] == (self._queries[1], 1)
            and out.is_contiguous()
            and lengths.is_contiguous()
            and strides[2:] == (self._block[2], 1)
            and block_table.stride(1) == 1
            and query.device == cache.device == block_table.device == lengths.device == out.device == _CPU
        )
        if not right:
            given = {"query": query, "cache": cache, "block_table": block_table, "lengths": lengths, "out": out}
            raise ValueError(
                f"attention of queries [requests, {self._queries[0]}, {self._queries[1]}] over a KV cache "
                f"[blocks, {self._block[0]}, {self._block[1]}, {self._block[2]}], bf16 and int32 in CPU memory, got "
                + ", ".join(f"{name} {each.dtype} {list(each.shape)} {each.stride()}" for name, each in given.items())
            )
        self._core.run(
            self._runtime.handle,
            cache.data_ptr(),
            strides[0],
            strides[1],
            cache.shape[0],
            query.data_ptr(),
            query.stride(0),
            block_table.data_ptr(),
            block_table.shape[1],
            block_table.stride(0),
            lengths.data_ptr(),
            requests,
            out.data_ptr(),
        )
        return out


_CPU = torch.device("cpu")
