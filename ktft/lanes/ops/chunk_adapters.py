"""LoRA of a chunk's experts for each matrix that a device multiplies by: gate and up together, and down."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ktft.lanes.ops.dropout import Dropout
from ktft.lora import ExpertLora, LoraPair


@dataclass(frozen=True)
class Adapters:
    """The adapters of projections that read the same input and whose outputs lie side by side.

    A place is a column of one part of B, with the row of A that belongs to it. Each projection has places of its own,
    as many as `ChunkWeights` says.

    Attributes:
        pairs: each projection's adapter; None if it has none.
        begins: each projection's first place.
        places: the number of all places.
        dropouts: what is dropped of each projection's input.
        kept: the probability that an element is not dropped.
    """

    pairs: tuple[LoraPair | None, ...]
    begins: tuple[int, ...]
    places: int
    dropouts: tuple[Dropout | None, ...]
    kept: float

    @classmethod
    def of(cls, lora: ExpertLora | None, names: Sequence[str], places: Mapping[str, int]) -> Adapters | None:
        """The adapters of these projections; None if there are none."""
        pairs = tuple(lora.pairs.get(name) for name in names) if lora is not None else ()
        if lora is None or not any(pairs):
            return None
        begins = (0, *itertools.accumulate(places.get(name, 0) for name in names))
        dropouts = tuple(Dropout.of(lora, name) for name in names)
        return cls(pairs, begins[:-1], begins[-1], dropouts, 1.0 - lora.dropout)

    def masked(self) -> Iterator[tuple[int, int, Dropout | None]]:
        """Ranges of places [begin, end) with the same mask: all places if nothing is dropped, else one projection's."""
        if self.dropouts[0] is None:
            yield 0, self.places, None
            return
        ends = (*self.begins[1:], self.places)
        yield from (part for part in zip(self.begins, ends, self.dropouts, strict=True) if part[0] < part[1])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors a and b of each projection that has an adapter."""
        return [tensor for pair in self.pairs if pair is not None for tensor in (pair.a, pair.b)]
