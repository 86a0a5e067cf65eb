"""Keeps outputs of routed experts from a forward without gradients until it is recomputed.

Reentrant activation checkpointing, which LLaMA-Factory uses, runs each decoder layer twice: first without gradients,
then again within backward. The experts' output is the same both times, but computing it costs as much as the rest of
the step. So it is kept, `[T, H]` a layer, and only backward computes gate and up again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ktft.lanes.routes import Routes
from ktft.lora import ExpertLora

MOST = 2
"""How many outputs of a layer are kept: DPO's reference runs between the policy's forward and its backward."""


class Inputs(NamedTuple):
    """What an output is found by, in host memory: expert numbers and routing weights, `[T, k]` int64 and fp32, and the
    sum of each token's hidden states, fp32 `[T]`.

    Equal routing alone proves nothing, because a top-1 router's normalized weights are all 1.
    """

    top_k_index: Tensor
    top_k_weights: Tensor
    sums: Tensor


@dataclass(frozen=True, eq=False)  # comparing tensors gives no single truth value, so objects compare by identity
class Kept:
    """An output, with what its backward needs."""

    inputs: Inputs
    routes: Routes
    lora: ExpertLora | None  # keeps its tensors alive, so that no other gets their identity
    state: tuple[object, ...]
    out: Tensor
    version: int  # of out, which the model may change in place


@dataclass
class OwnRows:
    """This rank's rows of an output of which the lanes compute all ranks' rows. Only they are kept, `[T, H]` too.

    Attributes:
        found: the rows that were kept, if there are any.
        keep: keeps the rows; None if nobody will ask for them.
    """

    found: Tensor | None = None
    keep: Callable[[Tensor], None] | None = None


class KeptOutputs:
    """The kept outputs of one layer, newest last.

    An output is found by its inputs, bit for bit, the versions of its adapters and its dropout seed. An output that is
    not found is computed again. Each step of training forgets what the step before left.

    Attributes:
        linked: what belongs to calls that are known to be run again, by who knows it: a `Kept`, or something else.
    """

    def __init__(self) -> None:
        self._kept: deque[Kept] = deque(maxlen=MOST)
        self._mutex = threading.Lock()
        self.linked: dict[Hashable, Any] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Bytes of the outputs."""
        with self._mutex:
            return sum(kept.out.nbytes for kept in (*self._kept, *self.linked.values()))

    def keep(self, inputs: Inputs, routes: Routes, lora: ExpertLora | None, out: Tensor, link: Hashable = None) -> None:
        """Keep an output `[T, H]`, on any device, and its rows."""
        kept = Kept(inputs, routes, lora, state_of(lora), out, out._version)
        with self._mutex:
            if link is None:
                self._kept.append(kept)
            else:
                self.linked[link] = kept

    def take(self, link: Hashable, lora: ExpertLora | None) -> Kept | None:
        """Remove and return what is kept for a link, if neither the output nor the adapters have changed."""
        kept = self.linked.pop(link, None)
        unchanged = isinstance(kept, Kept) and kept.state == state_of(lora) and kept.out._version == kept.version
        return kept if unchanged else None

    def pop(self, inputs: Inputs, lora: ExpertLora | None) -> tuple[Tensor, Routes] | None:
        """Remove and return the output of these inputs and adapters, with its rows; None if it is not here."""
        state = state_of(lora)
        with self._mutex:
            for kept in reversed(self._kept):
                unchanged = kept.state == state and kept.out._version == kept.version
                same = zip(kept.inputs, inputs, strict=True)
                if unchanged and all(np.array_equal(old.numpy(), new.numpy()) for old, new in same):
                    self._kept.remove(kept)
                    return kept.out.detach(), kept.routes
        return None

    def take_all(self) -> list[tuple[Hashable, Any]]:
        """Remove all that is kept, each with its link or None, oldest first. Each has `out` and its `version`."""
        with self._mutex:
            found = [*((None, kept) for kept in self._kept), *self.linked.items()]
            self._kept.clear()
            self.linked.clear()
        return found

    def put_back(self, link: Hashable, kept: Any) -> None:
        """Keep what `take_all` removed."""
        with self._mutex:
            if link is None:
                self._kept.append(kept)
            else:
                self.linked[link] = kept

    def clear(self) -> None:
        with self._mutex:
            self._kept.clear()
            self.linked.clear()


def state_of(lora: ExpertLora | None) -> tuple[object, ...]:
    """What changes when the adapters do."""
    if lora is None:
        return ()
    tensors = tuple((id(tensor), tensor._version) for tensor in lora.parameters())
    return (lora.dropout, lora.seed, lora.first_route, *tensors, *(pair.scaling for pair in lora.pairs.values()))
