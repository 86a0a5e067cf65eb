"""Attention of a decode step on a CPU by ktft's threads, over the KV cache that vLLM has laid out.

vLLM's kernel takes one thread for a short step (see `ktft.serve.vllm.cpu_worker`), and widens every key and value for
each step on its own. vLLM goes on to compute prompts. A step with drafts has a few tokens of each request; ktft
computes these, too, so that answers are those without drafts. Where values lie in the cache is vLLM's own affair, so
what ktft reads and writes there is compared with vLLM's before it is used.
"""

from __future__ import annotations

import functools
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from ktft.native.attention import STEP, AttentionSizes, DecodeAttention, DecodeStep, Heads, KvCache
from ktft.native.machine import Runtime

logger = init_logger("vllm.ktft")

KERNELS = {"vec": False, "vec16": False, "amx": True}
"""vLLM's names for its kernels whose layout of the cache ktft reads -> whether keys and values lie in pairs."""
MOST_NEW = 8
"""Tokens of one request in a step that ktft computes, each of which reads the whole context."""
TOLERANCE = 2e-2
"""Of outputs in bf16, whose largest values are about 1."""


_by_ktft: dict[str, bool] = {}
"""The layers of the process's model that have had a decode step, by name -> whether ktft computes these."""


def forget() -> None:
    """Drop what is known of a model that this process served before."""
    _by_ktft.clear()


def decodes() -> bool:
    """Whether ktft computes the attention of all decode steps."""
    return bool(_by_ktft) and all(_by_ktft.values())


@dataclass(frozen=True)
class LayerAttention:
    """A layer whose decode steps ktft computes."""

    decode: DecodeAttention
    cache: KvCache


def layer_attention(layer: Any, runtime: Runtime) -> LayerAttention | None:
    """What computes a layer's decode steps, once the layer has its KV cache; None where vLLM goes on to do that."""
    found = _layer_attention(layer, runtime)
    _by_ktft[layer.layer_name] = found is not None
    return found


def _layer_attention(layer: Any, runtime: Runtime) -> LayerAttention | None:
    impl, cache = layer.impl, layer.kv_cache
    sinks = impl.sinks
    plain = (
        getattr(layer, "isa", None) in KERNELS
        and impl.attn_type == AttentionType.DECODER
        and impl.alibi_slopes is None
        and not impl.logits_soft_cap
        and impl.kv_cache_dtype in ("auto", "bfloat16")
        and layer.head_size_v == layer.head_size
    )
    if not plain or cache.dtype != torch.bfloat16 or cache.dim() != 4:
        return None
    block_size, window = cache.shape[2], max(impl.sliding_window, 0)
    if layer.head_size % STEP or block_size % STEP or cache.shape[3] != 2 * layer.head_size:
        return None
    sizes = AttentionSizes(layer.num_heads, layer.num_kv_heads, layer.head_size, block_size)
    if not _agrees(runtime, layer.isa, sizes, window, sinks is not None):
        return None
    decode = DecodeAttention(runtime, sizes, impl.scale, window, sinks)
    return LayerAttention(decode, KvCache(cache, KERNELS[layer.isa]))


def keeps_own_cache(layer: Any) -> bool:
    """Whether a layer's attention is vLLM's for CPUs, over keys and values of its own in the model's dtype."""
    return (
        type(layer.impl) is CPUAttentionBackendImpl
        and layer.query_quant is None
        and layer.kv_sharing_target_layer_name is None
        and not layer.attn_backend.forward_includes_kv_cache_update
    )


def is_decode(metadata: Any, rows: int) -> bool:
    """Whether these rows are a few tokens of each request."""
    few = metadata.max_query_len <= MOST_NEW and metadata.num_actual_tokens == rows
    return bool(few and metadata.causal and metadata.dynamic_causal is None)


class DecodeSteps:
    """Steps of a few tokens a request: in one pass, vLLM gives the same tensors to all layers that share blocks."""

    def __init__(self) -> None:
        self._of: tuple[Any, ...] = ()
        self._step: DecodeStep | None = None

    def of(
        self, context: Any, metadata: Any, positions: Tensor | None = None, slots: Tensor | None = None
    ) -> DecodeStep:
        """The step with vLLM's metadata, in a pass with its forward context. Each token is a request with the context
        up to itself.

        Raises:
            ValueError: see `DecodeStep`.
        """
        table, lengths, starts = metadata.block_table, metadata.seq_lens, metadata.query_start_loc
        given = context, table, lengths, starts, positions, slots  # another pass may write the same tensors anew
        if self._step is None or any(new is not old for new, old in zip(given, self._of, strict=True)):
            if metadata.num_actual_tokens != len(lengths):
                counts = starts.diff()
                later = torch.repeat_interleave(starts[1:], counts) - 1 - torch.arange(metadata.num_actual_tokens)
                table = table.repeat_interleave(counts, 0)
                lengths = (lengths.repeat_interleave(counts) - later).to(torch.int32)
            self._step, self._of = DecodeStep(table, lengths, positions, slots), given
        return self._step


steps = DecodeSteps()


@functools.cache
def _agrees(runtime: Runtime, isa: str, sizes: AttentionSizes, window: int, with_sinks: bool) -> bool:
    """Whether ktft finds what vLLM finds, for made-up contexts in a cache of vLLM's, and writes the same cache."""
    made_up, scale = _MadeUp(isa, sizes), sizes.head_size**-0.5
    sinks = made_up.drawn(sizes.heads) if with_sinks else None
    theirs = made_up.by_vllm(scale, window or -1, sinks)
    ours = DecodeAttention(runtime, sizes, scale, window, sinks)(
        made_up.query, KvCache(made_up.cache, KERNELS[isa]), made_up.step, torch.empty_like(made_up.query)
    )
    apart = (ours.float() - theirs.float()).abs().max().item()
    if apart < TOLERANCE and torch.equal(made_up.written_by_ktft(runtime), made_up.cache):  # false for NaN, too
        return True
    logger.warning(
        "ktft's attention for single tokens differs by %.3g from vLLM's, of which up to %.3g is rounding, or writes "
        "other places of the KV cache, so vLLM's is used, which is slower. vLLM has probably changed its KV cache "
        "(kernel %r, %d heads, %d of keys and values, of %d, blocks of %d).",
        *(apart, TOLERANCE, isa, *astuple(sizes)),
    )
    return False


class _MadeUp:
    """Three requests with random contexts, of which one has several blocks in no order."""

    def __init__(self, isa: str, sizes: AttentionSizes) -> None:
        heads, kv_heads, head_size, block_size = astuple(sizes)
        self._generator = torch.Generator().manual_seed(1)
        self._isa, self._sizes = isa, sizes
        self.lengths = torch.tensor([2 * block_size + 5, 1, block_size], dtype=torch.int32)
        self.table = torch.tensor([[4, 1, 3], [2, 0, 0], [5, 0, 0]], dtype=torch.int32)
        self.step = DecodeStep(self.table, self.lengths)
        self.query = self.drawn(3, heads, head_size)
        self.cache = torch.zeros(6, kv_heads, block_size, 2 * head_size, dtype=torch.bfloat16)
        self._halves = self.cache.view(6, kv_heads, 2 * block_size, head_size).chunk(2, dim=2)
        self._written: list[tuple[Tensor, Tensor, Tensor]] = []
        for blocks, length in zip(self.table, self.lengths.tolist(), strict=True):
            at = torch.arange(length)
            slots = blocks.long()[at // block_size] * block_size + at % block_size
            written = self.drawn(length, kv_heads, head_size), self.drawn(length, kv_heads, head_size)
            ops.cpu_attn_reshape_and_cache(*written, *self._halves, slots, isa, 1.0, 1.0, "auto")
            self._written.append((*written, slots))

    def drawn(self, *shape: int) -> Tensor:
        """Random values in bf16."""
        return torch.randn(shape, generator=self._generator).bfloat16()

    def written_by_ktft(self, runtime: Runtime) -> Tensor:
        """The cache, as ktft writes it."""
        cache, (heads, _, head_size, _) = torch.zeros_like(self.cache), astuple(self._sizes)
        write = Heads(runtime, self._sizes).write
        for keys, values, slots in self._written:
            qkv = torch.cat([keys.new_zeros(len(keys), heads, head_size), keys, values], 1).flatten(1)
            write(qkv, torch.zeros_like(slots), slots, KvCache(cache, KERNELS[self._isa]))
        return cache

    def by_vllm(self, scale: float, window: int, sinks: Tensor | None) -> Tensor:
        """What vLLM's attention finds."""
        common = {
            "query_start_loc": torch.arange(4, dtype=torch.int32),
            "seq_lens": self.lengths,
            "causal": True,
            "dynamic_causal": None,
            "kv_cache_dtype": "auto",
        }
        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=3,
            dtype=torch.bfloat16,
            sliding_window_size=window,
            isa=self._isa,
            enable_kv_split=True,
            num_heads=self._sizes.heads,
            num_kv_heads=self._sizes.kv_heads,
            head_dim=self._sizes.head_size,
            **common,
        )
        out = torch.empty_like(self.query)
        ops.cpu_attention_with_kv_cache(
            query=self.query,
            key_cache=self._halves[0],
            value_cache=self._halves[1],
            output=out,
            scale=scale,
            alibi_slopes=None,
            sliding_window=window,
            block_table=self.table,
            softcap=0.0,
            scheduler_metadata=schedule,
            s_aux=sinks,
            k_scale=1.0,
            v_scale=1.0,
            **common,
        )
        return out
