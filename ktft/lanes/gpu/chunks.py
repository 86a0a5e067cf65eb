"""A layer's experts in chunks, which a lane decodes and multiplies together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lanes.gpu.buffers import ChunkLayout
from ktft.lanes.gpu.graphs import Recorded
from ktft.lanes.gpu.rings import RingPlace
from ktft.lanes.ops.chunk import place
from ktft.lanes.ops.weights import ChunkWeights
from ktft.lora import ExpertLora, LoraPair
from ktft.native import ExpertLayer


class ResidentBlocks(Protocol):
    """What a lane must know of the experts that stay on its device; see `ktft.lanes.gpu.residents.Residents`."""

    arrived: Any
    moved: int

    @property
    def bytes(self) -> int: ...

    def slots(self, layer: ExpertLayer) -> dict[int, int]: ...

    def blocks(self, layer: ExpertLayer) -> list[Tensor]: ...


@dataclass
class Chunk:
    """Experts that are decoded and multiplied together.

    Attributes:
        layout: their layer's.
        streamed: those whose packed bytes are copied; the others are residents.
        slots: int32 on the device, where each expert lies, as `decode` takes it; None if all are streamed.
        packed: where packed bytes are copied to, once that has begun.
        adapters: likewise their LoRA.
        steady: whether it belongs to a steady pass.
    """

    layout: ChunkLayout
    experts: list[int]
    streamed: list[int]
    slots: Tensor | None = None
    packed: RingPlace | None = None
    adapters: RingPlace | None = None
    steady: bool = False


def cut(layout: ChunkLayout, experts: Sequence[int]) -> Iterator[Chunk]:
    """Cut experts, all of them streamed, into chunks of about the same size."""
    count = -(-len(experts) // layout.capacity)
    for i in range(count):
        own = list(experts[len(experts) * i // count : len(experts) * (i + 1) // count])
        yield Chunk(layout, own, own)


class Kernels(NamedTuple):
    """Kernels of a chunk, and everything that they depend on; None if they are not worth being recorded."""

    key: Hashable
    run: Callable[[], None]


def kernels_of(chunk: Chunk, addresses: Sequence[int], run: Callable[[], None], *others: Hashable) -> Kernels:
    """Kernels that read a chunk's bytes at these addresses, and depend on `others`. Outside steady passes only a full
    chunk is worth being recorded, because the number of experts of others changes often.
    """
    layout, count = chunk.layout, len(chunk.experts)
    again = chunk.steady or count == layout.capacity
    return Kernels((layout.kind, count, *addresses, *others) if again else None, run)


def run_together(recorded: Recorded, kernels: Sequence[Kernels]) -> None:
    """Run these kernels, one after the other, as one piece of work."""
    keys = [each.key for each in kernels]

    def run() -> None:
        for each in kernels:
            each.run()

    recorded.run(None if None in keys else tuple(keys), run)


@dataclass
class DecodedChunk:
    """A chunk's weights, and its adapters on the device.

    Attributes:
        left: what is left to do before they are there.
    """

    experts: list[int]
    weights: ChunkWeights
    adapters: ExpertLora | None = None
    left: list[Kernels] = field(default_factory=list)

    def place(self, chunk: Chunk, adapters: RingPlace, lora: ExpertLora) -> None:
        """Leave it to be done that the chunk's adapters are written beside its weights."""
        views = iter(adapters.first(len(chunk.experts)))
        scalings = {name: lora.pairs[name].scaling for name in PROJECTIONS if name in lora.pairs}
        pairs = {name: LoraPair(next(views), next(views), each) for name, each in scalings.items()}
        self.adapters = replace(lora, pairs=pairs)
        work = partial(place, self.adapters, self.weights)
        self.left.append(kernels_of(chunk, adapters.addresses, work, lora.dropout, *scalings.values()))
