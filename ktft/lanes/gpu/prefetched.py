"""What a lane copies before the call that needs it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ktft.lanes.decide.placer import Coming
from ktft.lanes.gpu.buffers import Buffers, ChunkLayout
from ktft.lanes.gpu.chunks import Chunk
from ktft.lanes.gpu.rings import RingPlace
from ktft.lora import ExpertLora


class Prefetched:
    """Packed experts, and LoRA, of the first chunks of one layer's next call. Another layer's call drops them.

    Attributes:
        chunks: those whose packed experts were begun to be copied.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self.chunks: list[Chunk] = []
        self._adapters: list[RingPlace] = []
        self._layout: ChunkLayout | None = None  # the adapters', and the versions of their tensors
        self._versions: tuple[int, ...] = ()

    def fill(self, chunks: Iterable[Chunk]) -> None:
        """Begin to copy packed experts of these chunks, as many as the buffers hold."""
        for chunk in chunks:
            if len(self.chunks) == len(chunk.layout.packed):
                return
            chunk.packed = self._buffers.packed.fill(chunk.layout.packed, chunk.experts)
            self.chunks.append(chunk)

    def fill_beside(self, chunks: Sequence[Chunk]) -> None:
        """Begin to copy packed experts of a later call to buffers that `chunks` do not have. It finds them there."""
        room = len(chunks[0].layout.packed) - len(self.chunks) if chunks else 0
        for chunk in chunks[:room]:
            self._buffers.packed.fill(chunk.layout.packed, chunk.experts)

    def fill_adapters(self, layout: ChunkLayout, lora: ExpertLora, chunks: Sequence[Chunk]) -> None:
        """Begin to copy LoRA of the first chunks, to half of the buffers, since the others may be in use."""
        first = chunks[: len(layout.adapters) // 2]
        self._adapters = [self._buffers.adapters.fill(layout.adapters, chunk.experts) for chunk in first]
        self._layout, self._versions = layout, _versions(lora)

    def has_adapters(self) -> bool:
        return bool(self._adapters)

    def give_to(self, chunks: Sequence[Chunk], lora: ExpertLora | None) -> None:
        """Let a steady pass have what was copied for it, but no LoRA that has changed since; drop all else."""
        left = list(self.chunks)
        for chunk in (chunk for chunk in chunks if chunk.streamed):
            if not left or left[0].layout is not chunk.layout or left[0].experts != chunk.streamed:
                break
            chunk.packed = left.pop(0).packed
        self._drop(len(left))
        if lora is not None and chunks and self._layout is chunks[0].layout and self._versions == _versions(lora):
            for chunk, place in zip(chunks, self._adapters, strict=False):
                chunk.adapters = place
            self._adapters = []
        self._drop_adapters()

    def take(self, layout: ChunkLayout, wanted: set[int]) -> list[Chunk]:
        """The first of the chunks that belong to a layer and have none but these experts; drop all else."""
        mine = itertools.takewhile(lambda c: c.layout is layout and wanted.issuperset(c.experts), self.chunks)
        taken = list(mine)
        self._drop(len(self.chunks) - len(taken))
        self._drop_adapters()
        return taken

    def coming(self, layout: ChunkLayout) -> Coming:
        """The experts that are being copied for a call of this layer."""
        if not self.chunks or self.chunks[0].layout is not layout:
            return Coming()
        sizes = [len(chunk.experts) for chunk in self.chunks]
        there = sum(chunk.packed is not None and chunk.packed.there() for chunk in self.chunks)
        # The chunk that is being copied counts as half arrived, for nothing says how far it is
        arrived = sum(sizes[:there]) + sum(sizes[there : there + 1]) / 2
        return Coming([expert for chunk in self.chunks for expert in chunk.experts], arrived)

    def forget(self) -> None:
        """Drop all."""
        self._drop(len(self.chunks))
        self._drop_adapters()

    def _drop(self, last: int) -> None:
        """Give back the buffers of the last of the chunks, which were not taken."""
        self._buffers.packed.turn_back(last)
        self.chunks.clear()

    def _drop_adapters(self) -> None:
        self._buffers.adapters.turn_back(len(self._adapters))
        self._adapters, self._layout, self._versions = [], None, ()


def _versions(lora: ExpertLora) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in lora.parameters())
