"""Outputs of routed experts, kept from a forward without gradients to its recomputation.

Reentrant activation checkpointing, which LLaMA-Factory uses, runs each decoder layer twice: without gradients, then
again within backward. The experts' output is the same both times, but computing it costs as much as all else in the
step: it is kept, `[T, H]` a layer, and only backward computes gate and up again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ktft.lanes.routes import Routes
from ktft.lora import ExpertLora

MOST = 2
"""Outputs kept of one layer: DPO's reference runs between the policy's forward and its backward."""


@dataclass(frozen=True, eq=False)  # tensors have no one truth value: each is only itself
class _Kept:
    inputs: tuple[Tensor, Tensor]
    routes: Routes
    lora: ExpertLora | None  # holds its tensors, so that no other gets their identity
    state: tuple[object, ...]
    out: Tensor
    version: int  # of out, which the model may change in place


class KeptOutputs:
    """Those of one layer, the newest last.

    An output is found by its routing (expert numbers and weights, bit for bit), its adapters' versions and its dropout
    seed. What is not found is computed again.
    """

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque(maxlen=MOST)

    def __len__(self) -> int:
        return len(self._kept)

    def keep(
        self, top_k_index: Tensor, top_k_weights: Tensor, routes: Routes, lora: ExpertLora | None, out: Tensor
    ) -> None:
        """Remember an output `[T, H]`, wherever it is, of routing `[T, k]` in host memory, and its rows."""
        self._kept.append(_Kept((top_k_index, top_k_weights), routes, lora, _state(lora), out, out._version))

    def take(self, top_k_index: Tensor, top_k_weights: Tensor, lora: ExpertLora | None) -> tuple[Tensor, Routes] | None:
        """The output of this routing and these adapters, and its rows, forgotten here; None if there is none."""
        state = _state(lora)
        for kept in reversed(self._kept):
            unchanged = kept.state == state and kept.out._version == kept.version
            same = zip(kept.inputs, (top_k_index, top_k_weights), strict=True)
            if unchanged and all(np.array_equal(old.numpy(), new.numpy()) for old, new in same):
                self._kept.remove(kept)
                return kept.out.detach(), kept.routes
        return None


def _state(lora: ExpertLora | None) -> tuple[object, ...]:
    if lora is None:
        return ()
    tensors = tuple((id(tensor), tensor._version) for tensor in lora.parameters())
    return (lora.dropout, lora.seed, *tensors, *(pair.scaling for pair in lora.pairs.values()))
