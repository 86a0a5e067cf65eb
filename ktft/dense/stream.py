"""Dense weights that stay in host memory, and are copied to the GPU layer by layer as training comes to them."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from ktft.device import device_of
from ktft.lanes.gpu.transfer import transfer

_ALIGNED = 256
SLOTS = 2
"""Layers on the GPU at once: one that computes, and the next in the direction in which they are used."""


class DenseStream:
    """The dense weights of all decoder layers, of which two are on the GPU.

    A layer is copied when a pass comes to the one before, in either direction, so that in each pass every layer crosses
    once, however many micro-batches go through it there. Kernels that are enqueued may still read a layer: the copy of
    another to its place waits for all that was enqueued before it was asked for.

    Args:
        layers: for each layer the bytes of its weights, uint8 in host memory. They are moved into one block a layer,
            and taken from the lists.

    Attributes:
        copies: how many layers have been copied so far.
    """

    def __init__(self, layers: Sequence[list[Tensor]]) -> None:
        self._host: list[Tensor] = []
        self._places: list[tuple[int, int, int]] = []  # of each weight: its layer, where it begins there, its size
        for number, weights in enumerate(layers):
            begin = 0
            for weight in weights:
                self._places.append((number, begin, weight.numel()))
                begin += -(-weight.numel() // _ALIGNED) * _ALIGNED
            block = torch.zeros(begin, dtype=torch.uint8)
            for (_, at, size), weight in zip(self._places[-len(weights) :], weights, strict=True):
                block[at : at + size] = weight
            self._host.append(block)
            weights.clear()
        self._slots: list[Tensor] = []
        self._holds: list[int | None] = [None] * SLOTS
        self._last = 0
        self._mutex = threading.Lock()  # autograd goes backward in a thread of its own
        self.copies = 0

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(block.numel() for block in self._host)

    @property
    def slot_bytes(self) -> int:
        """Bytes of memory on the GPU."""
        return SLOTS * max((block.numel() for block in self._host), default=0)

    @property
    def coming_bytes(self) -> int:
        """Bytes of memory on the GPU that the first use will take."""
        return 0 if self._slots else self.slot_bytes

    def bytes_of(self, place: int, device: torch.device) -> Tensor:
        """The bytes of weight number `place`, on the device once its current stream has passed this point.

        They stay there until another layer is asked for.
        """
        layer, begin, size = self._places[place]
        with self._mutex:
            if not self._slots or self._slots[0].device != device:
                self._move(device)
            slot = self._hold(layer)
            return self._slots[slot][begin : begin + size]

    def _move(self, device: torch.device) -> None:
        """Use this device from now on. Its memory is taken here."""
        self._device = device_of(device)
        self._stream = self._device.new_stream()
        self._ready = [self._device.event() for _ in range(SLOTS)]
        locks = transfer(self._device.indexed()).locks
        for block in self._host:
            locks.tensor(block)
        size = self.slot_bytes // SLOTS
        self._slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self._holds, self._last = [None] * SLOTS, 0

    def _hold(self, layer: int) -> int:
        """The slot with the layer, from which the current stream may read. The next layer's copy begins."""
        if layer == self._last and layer in self._holds:
            return self._holds.index(layer)
        direction = 1 if layer >= self._last else -1
        self._last = layer
        slot = self._copied(layer, spared=None)
        self._ready[slot].wait(self._device.current_stream())
        if 0 <= layer + direction < len(self._host):
            self._copied(layer + direction, spared=slot)
        return slot

    def _copied(self, layer: int, spared: int | None) -> int:
        """The slot that has the layer, or gets it: not the spared one."""
        if layer in self._holds:
            return self._holds.index(layer)
        slot, block = 1 if spared == 0 else 0, self._host[layer]
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            self._slots[slot][: block.numel()].copy_(block, non_blocking=True)
            self._ready[slot].record(self._stream)
        self._holds[slot], self.copies = layer, self.copies + 1
        return slot
