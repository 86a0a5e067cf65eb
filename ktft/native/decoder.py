"""Decoder layers of a decode step on the CPU: a router with its experts, and all of a layer around them."""

from __future__ import annotations

import torch
from torch import Tensor

from ktft.native.attention import AttentionBlock, DecodeStep, KvCache
from ktft.native.dense import HostDense
from ktft.native.extension import core
from ktft.native.layer import ExpertLayer
from ktft.native.norm import HostNorm
from ktft.native.tensors import described


class MoeBlock:
    """A router that chooses by softmax, and its experts, without LoRA.

    Args:
        router: `[num_experts, hidden_size]`.
        top_k, renormalize: see `ktft.native.routing.choose_experts`.
        chosen: int64 `[num_experts]`: how often each expert was chosen, to which each call adds.
        activation_bits: of the experts, see `ExpertLayer.forward`.

    Attributes:
        seconds: the time that the experts have taken.

    Raises:
        ValueError: the router or `chosen` does not fit the experts, or there are fewer than `top_k`.
    """

    def __init__(
        self,
        router: HostDense,
        experts: ExpertLayer,
        top_k: int,
        renormalize: bool,
        chosen: Tensor,
        activation_bits: int = 16,
    ) -> None:
        count, self._size = experts.num_experts, experts.hidden_size
        if router.shape != (count, self._size) or not 1 <= top_k <= count:
            raise ValueError(
                f"{experts.name}: a router {list(router.shape)} that chooses {top_k} does not fit {count} experts with "
                f"hidden_size {self._size}"
            )
        if chosen.shape != (count,) or chosen.dtype != torch.int64 or not _is_plain(chosen):
            raise ValueError(f"{experts.name}: chosen is int64 [{count}] in CPU memory, got {described(chosen)}")
        self.router, self.seconds, self._kept = router, 0.0, (experts, chosen)
        at = chosen.data_ptr()
        self.handle = core.MoeBlock(router.handle, experts.handle, top_k, renormalize, activation_bits, at)
        self._runtime, self.name = router.runtime.handle, experts.name

    def __call__(self, x: Tensor) -> Tensor:
        """From hidden states, bf16 `[T, H]`, to the sum over the chosen experts, likewise.

        Raises:
            ValueError: a shape or a dtype is wrong, or hidden states hold NaN or Inf.
        """
        if x.shape[1:] != (self._size,) or x.dtype != torch.bfloat16 or not _is_plain(x):
            raise ValueError(
                f"{self.name}: a router takes contiguous bf16 [tokens, {self._size}] in CPU memory, got {described(x)}"
            )
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        self.seconds += self.handle.run(self._runtime, x.data_ptr(), len(x), out.data_ptr())
        return out


class DecoderLayer:
    """A layer's norms, attention and experts, for decode steps.

    Args:
        attention_norm, experts_norm: the norms before each block.
        attention, experts: the blocks, of the same runtime.

    Raises:
        ValueError: the parts are not of one hidden size.
    """

    def __init__(
        self, attention_norm: HostNorm, attention: AttentionBlock, experts_norm: HostNorm, experts: MoeBlock
    ) -> None:
        size = experts.router.shape[1]
        if {attention_norm.size, experts_norm.size, *attention.hidden_sizes} != {size}:
            raise ValueError(
                f"{experts.name}: norms of {attention_norm.size} and {experts_norm.size} and attention "
                f"{attention.hidden_sizes} do not fit experts with hidden_size {size}"
            )
        self._size, self._attention, self._experts = size, attention, experts
        self._runtime, self._kept = experts.router.runtime.handle, (attention_norm, experts_norm)
        self._core = core.DecoderLayer(attention_norm.handle, attention.handle, experts_norm.handle, experts.handle)

    def __call__(self, x: Tensor, residual: Tensor | None, cache: KvCache, step: DecodeStep) -> tuple[Tensor, Tensor]:
        """From hidden states and the residual that they are added to, to those that the next layer takes.

        Args:
            x: contiguous bf16 `[requests, hidden_size]`.
            residual: likewise, and written; None stands for zeros, and `x` then becomes the residual.

        Raises:
            ValueError: as the parts do.
        """
        shape, block = (step.requests, self._size), self._attention.block
        right = x.shape == shape and x.dtype == torch.bfloat16 and _is_plain(x)
        if residual is not None:
            right = right and residual.shape == shape and residual.dtype == torch.bfloat16 and _is_plain(residual)
        if not right or not step.places or cache.block != block:
            given = [x] if residual is None else [x, residual]
            raise ValueError(
                f"{self._experts.name}: a decoder layer takes contiguous bf16 {list(shape)} in CPU memory, a step with "
                f"positions and slots and a KV cache {list(block)} a block, got "
                f"{' and '.join(map(described, given))}, and {list(cache.block)}"
            )
        out = torch.empty(shape, dtype=torch.bfloat16)
        at = x.data_ptr(), 0 if residual is None else residual.data_ptr(), out.data_ptr()
        self._experts.seconds += self._core.run(self._runtime, cache.handle, step.handle, *at)
        return out, x if residual is None else residual


def _is_plain(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and tensor.device == _CPU


_CPU = torch.device("cpu")
