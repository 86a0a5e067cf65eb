"""Counts the tokens that each of a layer's experts gets while training."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from ktft.held import HeldExperts

_NEGLIGIBLE = 1e-25  # a gradient times a routing weight below this may vanish in bf16 kernels
_COUNTING = threading.Lock()  # one for all records, because a record with a lock could not be copied with its model
# A fork waits for the lock, so that no child finds it held by a thread which the child does not have
os.register_at_fork(before=_COUNTING.acquire, after_in_parent=_COUNTING.release, after_in_child=_COUNTING.release)


class Record:
    """Counts of one layer's trained tokens. `KtftExperts.record` holds one; without it nothing is counted.

    A micro-batch counts once, in its backward, however often checkpointing computes its forward. Passes without
    gradients, such as those of DPO's reference, are not counted.

    `held` are the experts that the process holds, `layer` is the layer's number.

    Attributes:
        tokens: `[held.count]` int64, (token, expert) pairs by expert.
        rows: number of tokens, padding included.
        watching: also count the pairs that the loss depends on, at the cost of one pass over the output's gradient.
    """

    def __init__(self, held: HeldExperts, layer: int | None = None) -> None:
        self.held, self.layer = held, layer
        self.tokens = torch.zeros(held.count, dtype=torch.int64)
        self._reached = torch.zeros(held.count, dtype=torch.int64)
        self._elsewhere: list[Tensor] = []  # counts still to be added; the device may not have computed them yet
        self.rows = 0
        self.watching = False

    @property
    def reached(self) -> Tensor:
        """`[held.count]` int64: pairs whose token had a nonzero gradient while `watching`. Waits for the GPU."""
        while self._elsewhere:
            self._reached += self._elsewhere.pop().cpu()
        return self._reached

    def count(self, top_k_index: Tensor) -> None:
        """Add the chosen experts of a micro-batch, `[T, k]` on the CPU; `ELSEWHERE` is not counted."""
        flat = top_k_index.numpy().reshape(-1)
        self.add(np.bincount(flat[flat >= 0], minlength=len(self.tokens)).tolist(), len(top_k_index))

    def add(self, counts: Sequence[int], tokens: int) -> None:
        """Add a micro-batch of so many tokens, whose pairs by expert are known."""
        found = torch.tensor(counts, dtype=torch.int64)
        with _COUNTING:
            self.tokens += found
            self.rows += tokens

    def count_reached(self, top_k_index: Tensor, top_k_weights: Tensor, grad_output: Tensor) -> None:
        """Add the pairs of `[T, k]` that the loss depends on, by the gradient `[T, H]` of the output.

        All tensors are on one device. This does not wait for a GPU.
        """
        strength = grad_output.abs().amax(1, keepdim=True).float() * top_k_weights.abs().float()
        here = top_k_index.flatten() >= 0
        pairs = ((strength > _NEGLIGIBLE).flatten() & here).to(torch.int64)
        found = torch.zeros(len(self._reached), dtype=torch.int64, device=pairs.device)
        self._elsewhere.append(found.scatter_add_(0, top_k_index.flatten().clamp(min=0).to(torch.int64), pairs))


def reached_by(records: Mapping[str, Record]) -> dict[str, Tensor]:
    """The name of each record -> its `reached`. What all have counted on their device comes with one copy."""
    found = [(record, each) for record in records.values() for each in record._elsewhere]
    if found:
        counts = torch.cat([each for _, each in found]).cpu()
        for (record, _), own in zip(found, counts.split([len(each) for _, each in found]), strict=True):
            record._reached += own
        for record, _ in found:
            record._elsewhere.clear()
    return {name: record.reached for name, record in records.items()}
