"""The GPU lane's memory, which all layers share, and where each layer's chunks lie in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ktft.lanes.gpu.rings import LEAST_BUFFERS, MOST_BUFFERS, Ring, RingPlace, Source, aligned, row_bytes
from ktft.lanes.gpu.transfer import Transfer
from ktft.lanes.ops.weights import ChunkWeights
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer
from ktft.native.packed import PackedSlice

META = torch.device("meta")
LEAST_CHUNKS = 2
"""The fewest chunks of a layer with all its experts: with one chunk, its products could not overlap its copy."""
ADAPTER_BUFFERS = 2 * LEAST_CHUNKS
"""How many buffers LoRA tensors take turns in: those of a layer that is queued at once, and of the next one."""


@dataclass(frozen=True)
class ChunkLayout:
    """Where a layer's chunks lie in the buffers; it is the same in every call of the layer.

    Attributes:
        slices: of the layer's packed experts.
        kind: equal for layers whose decoding and adapters are the same kernels, apart from the buffers that these read.
        capacity: the most experts of a chunk.
        packed, adapters: where packed bytes and LoRA tensors lie in each of their buffers.
        blocks: those of resident experts, of which there are more than the layer's: `Residents.blocks`.
        weights: memory of the decoded chunk.
    """

    slices: list[PackedSlice]
    kind: tuple[object, ...]
    capacity: int
    packed: list[RingPlace]
    adapters: list[RingPlace]
    blocks: list[Tensor]
    weights: ChunkWeights
    _decoded: dict[int, ChunkWeights] = field(default_factory=dict)

    def decoded(self, experts: int) -> ChunkWeights:
        """The part of `weights` for a chunk of so many experts."""
        if experts not in self._decoded:
            self._decoded[experts] = self.weights.changed(lambda tensor: tensor[:experts])
        return self._decoded[experts]


def chunking(experts: int, packed: int, one: int, chunk_bytes: int, limit: int) -> tuple[int, int]:
    """The most experts of a chunk, so that chunks have about the same size; and the number of buffers for packed bytes.

    Args:
        experts: the layer's.
        packed: packed bytes of one.
        one: bytes that each expert of a chunk takes in all buffers, with `LEAST_BUFFERS` for packed bytes.
        chunk_bytes, limit: as of `GpuLane`.
    """
    capacity = max(1, min(chunk_bytes // max(packed, 1), limit // one, -(-experts // LEAST_CHUNKS)))
    capacity = -(-experts // -(-experts // capacity))
    more = (limit - capacity * one) // max(capacity * packed, 1)
    return capacity, min(MOST_BUFFERS, LEAST_BUFFERS + max(more, 0))


def decoded_bytes(weights: ChunkWeights) -> int:
    """How many bytes of a buffer `laid_over` needs."""
    return sum(aligned(tensor.nbytes) for tensor in (*weights.gate_up.tensors, *weights.down.tensors))


def laid_over(weights: ChunkWeights, memory: Tensor) -> ChunkWeights:
    """Weights of the same shapes as views of a buffer, uint8 `[decoded_bytes]` or more."""
    left = memory

    def view(tensor: Tensor) -> Tensor:
        nonlocal left
        found, left = left[: tensor.nbytes], left[aligned(tensor.nbytes) :]
        return found.view(tensor.dtype).view(tensor.shape)

    return weights.changed(view)


class Buffers:
    """A lane's buffers: some for packed bytes, some for LoRA tensors (`adapters`), one for decoded weights. `GpuLane`
    explains `chunk_bytes` and `limit`.

    Attributes:
        slots: int32, for the blocks of a layer's residents; recorded kernels read it.
    """

    def __init__(self, transfer: Transfer, chunk_bytes: int, limit: int) -> None:
        self._transfer, self.chunk_bytes, self.limit = transfer, chunk_bytes, limit
        self.packed, self.adapters = Ring(transfer, frozen=True), Ring(transfer)
        self._decoded = torch.empty(0, dtype=torch.uint8, device=transfer.device)
        self.slots = torch.empty(0, dtype=torch.int32, device=transfer.device)
        self._layouts: weakref.WeakKeyDictionary[ExpertLayer, tuple[object, ChunkLayout]] = weakref.WeakKeyDictionary()

    @property
    def bytes(self) -> int:
        return self.packed.bytes + self.adapters.bytes + self._decoded.nbytes

    def forget(self) -> None:
        """Lay out all layers anew, because the residents' memory has changed."""
        self._layouts.clear()

    def layout(
        self, layer: ExpertLayer, lora: ExpertLora | None, residents: Callable[[ExpertLayer], list[Tensor]] | None
    ) -> ChunkLayout:
        """The layer's layout, which is made in its first call, and again when the adapters have other tensors.

        `residents` is `Residents.blocks`.

        Raises:
            torch.OutOfMemoryError: the device has no room.
            ValueError: a LoRA tensor is not a contiguous CPU tensor of the layer's experts.
        """
        parameters = lora.parameters() if lora is not None else []
        names = sorted(lora.pairs) if lora is not None else []
        signature = names, [(tensor.data_ptr(), tensor.shape, tensor.dtype) for tensor in parameters]
        found = self._layouts.get(layer)
        if found is None or found[0] != signature:
            with torch.inference_mode(False):  # a later call that trains writes there as well
                found = signature, self._make(layer, lora, residents)
            self._layouts[layer] = found
        return found[1]

    def _make(
        self, layer: ExpertLayer, lora: ExpertLora | None, residents: Callable[[ExpertLayer], list[Tensor]] | None
    ) -> ChunkLayout:
        parameters = lora.parameters() if lora is not None else []
        for tensor in parameters:
            if not tensor.is_contiguous() or tensor.device.type != "cpu" or tensor.shape[0] != layer.num_experts:
                raise ValueError(
                    f"{layer.name}: LoRA's tensors must be contiguous CPU tensors of {layer.num_experts} experts, got "
                    f"{list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
                )
        slices, locks = layer.slices(), self._transfer.locks
        locked = locks.layer(layer)
        blocks = [Source(part.address, (part.expert_bytes,), torch.uint8, locked) for part in slices]
        adapters = [Source(t.data_ptr(), tuple(t.shape[1:]), t.dtype, locks.tensor(t)) for t in parameters]

        one = LEAST_BUFFERS * row_bytes(blocks) + ADAPTER_BUFFERS * row_bytes(adapters)
        one += decoded_bytes(ChunkWeights.empty(layer, 1, lora, META))
        capacity, count = chunking(layer.num_experts, row_bytes(blocks), one, self.chunk_bytes, self.limit)
        weights = ChunkWeights.empty(layer, capacity, lora, META)
        parts = [(part.begin, part.expert_bytes, *part.matrices.values()) for part in slices]
        rows = [(source.shape, source.dtype) for source in adapters]
        ranks = [*weights.gate_up.places.items(), *weights.down.places.items()]
        size = Ring.size(adapters, capacity)
        if self._reserve(Ring.size(blocks, capacity), count, size, layer.num_experts, weights):
            self._layouts.clear()
        weights = laid_over(weights, self._decoded)
        return ChunkLayout(
            slices,
            (layer.format, capacity, self._decoded.data_ptr(), *ranks, *parts, *rows),
            capacity,
            self.packed.places(blocks, capacity),
            self.adapters.places(adapters, capacity) if adapters else [],
            residents(layer) if residents is not None else [],
            weights,
        )

    def _reserve(self, packed: int, count: int, adapters: int, slots: int, weights: ChunkWeights) -> bool:
        """Make all buffers large enough; returns whether any of them moved."""
        moved = [self.packed.reserve(packed, count), self.adapters.reserve(adapters, ADAPTER_BUFFERS)]
        if slots > len(self.slots):
            self.slots = self.slots.new_empty(slots)
            moved.append(True)
        if (size := decoded_bytes(weights)) > self._decoded.nbytes:
            self._decoded = self._decoded.new_empty(0)
            self._decoded = self._decoded.new_empty(size)
            moved.append(True)
        return any(moved)
