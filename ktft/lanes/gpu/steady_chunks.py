"""The chunks of steady passes, and where their experts lie."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ktft.device import device_of
from ktft.lanes.gpu.buffers import ChunkLayout
from ktft.lanes.gpu.chunks import Chunk, cut

KNOWN_SLOTS = 4096
"""The most sets of slots that stay on the device."""


class Slots:
    """Slots of experts, as `decode` takes them, on a device. Most calls of a layer need those of the call before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: dict[tuple[int, ...], Tensor] = {}

    def of(self, numbers: tuple[int, ...]) -> Tensor:
        if numbers not in self._known:
            if len(self._known) >= KNOWN_SLOTS:
                self._known.clear()
            with torch.inference_mode(False):
                made = torch.tensor(numbers, dtype=torch.int32, device="cpu")
                if device_of(self._device).pin_memory:
                    made = made.pin_memory()
                self._known[numbers] = made.to(self._device, non_blocking=True)
        return self._known[numbers]


class SteadyChunks(NamedTuple):
    """A layer's experts in the chunks of its steady passes.

    Attributes:
        layout: the layer's.
        moved: how often residents had moved then.
        slots: of all experts; None if none may be a resident.
    """

    layout: ChunkLayout
    moved: int
    chunks: list[Chunk]
    slots: Tensor | None

    def to_copy(self) -> list[Chunk]:
        """What is streamed of each chunk, as a chunk of its own."""
        return [Chunk(self.layout, each.streamed, each.streamed) for each in self.chunks if each.streamed]


def steady_chunks(
    layout: ChunkLayout, moved: int, experts: int, held: Mapping[int, int], slots: Slots | None
) -> SteadyChunks:
    """All experts of a layer in the order of their numbers, in chunks of about the same size. A chunk has residents as
    well as experts to be streamed, so the same kernels run whichever are `held`, each in its block.
    """
    chunks, numbers = list(cut(layout, range(experts))), list[int]()
    for chunk in chunks:
        chunk.steady, chunk.streamed = True, [expert for expert in chunk.experts if expert not in held]
        rows = itertools.count()
        numbers += [held[expert] if expert in held else -1 - next(rows) for expert in chunk.experts]
    if slots is None:
        return SteadyChunks(layout, moved, chunks, None)
    every = slots.of(tuple(numbers))
    for chunk, own in zip(chunks, every.split([len(chunk.experts) for chunk in chunks]), strict=True):
        chunk.slots = own
    return SteadyChunks(layout, moved, chunks, every)
