"""Keeps what waits for backward in host memory, where GPU memory is short.

When all micro-batches go through a layer before the next, each layer's input and the output of its experts wait from
its first pass to its second. While one layer runs, those of the layer before are copied to locked host memory, and
their memory on the GPU is free again one layer later. On the way back they return while the layer above is computed.

A tensor goes only if nothing but the calls of layers refers to it. So its last reference dies with its copy, which
frees its memory without a trick, and nobody can look at what is not there. What the model itself still has, such as
the input of a layer that is used again further up, stays.

Copies run on a stream for each direction. No memory is marked by `record_stream`, because a caching allocator would
then learn by polling when it is free, and take more meanwhile. Instead, whoever gives memory back first makes the
stream of the layers wait for the copy: what that stream does next may have the memory at once.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ktft import spans
from ktft.device import Device
from ktft.lanes.kept import KeptOutputs
from ktft.model.memory import LIVE, waiting_bytes
from ktft.system import readable

logger = logging.getLogger("ktft")

HOST_SHARE = 0.5
"""The most host memory for what waits, as a share of what is available."""
SLAB = 256 << 20
"""Bytes of host memory that are locked at once. torch rounds what it locks up to a power of two, as this is."""
_ALIGNED = 512

Place = tuple[list[Any], int]
"""An element of a list."""


def away_bytes(hidden_size: int, value_bytes: int, scores: int = 0) -> int:
    """Bytes of GPU memory that a token takes while its micro-batch waits for others, if what waits is in host memory:
    that of `LIVE` layers, and one layer with gradients. `ktft.model.memory.waiting_bytes` is the same without.
    """
    return waiting_bytes(hidden_size, LIVE, value_bytes, True, scores)


def host_bytes(hidden_size: int, layers: int, value_bytes: int) -> int:
    """Bytes of locked host memory that a token takes then: each layer's input and the output of its experts."""
    return 2 * layers * hidden_size * value_bytes


@dataclass(eq=False)
class _Sent:
    """A tensor that left.

    Attributes:
        shape, stride, dtype: of the tensor.
        parts: its bytes in host memory.
        places: where it was, and returns to. They hold this object meanwhile.
        leaf: whether it takes gradients.
        source: its memory on the device, until the copy is known to be done.
        left: event after the copy to the host.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    parts: list[Tensor]
    places: Sequence[Place]
    leaf: bool
    source: Tensor | None
    left: Any
    target: Tensor | None = None
    arrived: Any = None

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass
class _KeptAway:
    """What a layer's experts keep, but for the output, which `out` holds."""

    outputs: KeptOutputs
    link: Hashable
    kept: Any
    out: list[Any]

    def put_back(self) -> None:
        out: Tensor = self.out[0]
        self.outputs.put_back(self.link, replace(self.kept, out=out, version=out._version))


class HostStack:
    """Locked host memory, taken in the order of the layers and given back all at once. It stays for the next step,
    because locking takes a second for some GB.

    Attributes:
        limit: the most bytes that it may hold.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._slabs, self._at = device, list[Tensor](), 0
        self.limit = 0

    @property
    def bytes(self) -> int:
        """Bytes that it holds."""
        return sum(slab.nbytes for slab in self._slabs)

    def clear(self) -> None:
        """Give back what was taken."""
        self._at = 0

    def take(self, size: int) -> list[Tensor] | None:
        """Pieces of memory with `size` bytes in all, uint8; None if there is no more."""
        begin, end = self._at, self._at + size
        while end > self.bytes:
            if not self._grow():
                return None
        self._at = -(-end // _ALIGNED) * _ALIGNED
        pieces, first = [], 0
        for slab in self._slabs:
            low, high = max(begin - first, 0), min(end - first, slab.nbytes)
            if low < high:
                pieces.append(slab[low:high])
            first += slab.nbytes
        return pieces

    def _grow(self) -> bool:
        if self.bytes + SLAB > self.limit:
            return False
        try:
            self._slabs.append(torch.empty(SLAB, dtype=torch.uint8, pin_memory=self._device.pin_memory))
        except RuntimeError as error:  # a limit on locked memory, for instance
            self.limit = self.bytes
            logger.warning(
                "no more than %s of host memory can be locked, so the rest of what waits for backward stays on the "
                "GPU: %s", readable(self.limit), str(error).partition("\n")[0],
            )  # fmt: skip
            return False
        return True


class Away:
    """What the present group of micro-batches has in host memory, by the number of the call of a layer.

    Attributes:
        on: whether anything goes there.
        host: the memory.
    """

    def __init__(self, device: Device) -> None:
        self._device, self.on, self.host = device, False, HostStack(device)
        self._sent: dict[int, list[_Sent]] = {}
        self._kept: dict[int, list[_KeptAway]] = {}
        self._leaving: list[tuple[int, _Sent]] = []
        self._out: Any = None
        self._into: Any = None

    def begin(self) -> None:
        """A group begins. Memory that was locked may be written again, since `back` and `end` have made the stream of
        the layers wait for all copies of the group before, and each copy waits for that stream.
        """
        if self.on and self._out is None:
            self._out, self._into = self._device.new_stream(), self._device.new_stream()

    def send(self, number: int, places: Sequence[Place]) -> None:
        """Send away a tensor that takes gradients, which call `number` of a layer got. It is in all of these places.

        Somebody else may hold it: then it stays.
        """
        tensor = places[0][0][places[0][1]]
        if not tensor.is_contiguous() or tensor.device != self._device.indexed():
            return
        # Not a detached tensor: that refers to the one it is made of
        source, seen = tensor.data, weakref.ref(tensor)
        del tensor
        for held, at in places:
            held[at] = None
        if (others := seen()) is not None or not self._copy(number, places, source, leaf=True):
            tensor = others if others is not None else source.requires_grad_()
            for held, at in places:
                held[at] = tensor

    def send_kept(self, number: int, outputs: KeptOutputs) -> None:
        """Send away what a layer's experts keep, of call `number`."""
        for link, kept in outputs.take_all():
            out: Tensor = kept.out
            holder = [out]
            fits = out.is_contiguous() and out.device == self._device.indexed() and out._version == kept.version
            if not fits or not self._copy(number, [(holder, 0)], out, leaf=False):
                outputs.put_back(link, kept)
                continue
            self._kept.setdefault(number, []).append(_KeptAway(outputs, link, replace(kept, out=None), holder))

    def _copy(self, number: int, places: Sequence[Place], source: Tensor, leaf: bool) -> bool:
        """Begin to copy a tensor to the host. Returns whether there is memory for it."""
        source = source.detach()
        if (parts := self.host.take(source.nbytes)) is None:
            return False
        self._out.wait_stream(self._device.current_stream())
        with (
            spans.device("copy_out", None, self._out, bytes=source.nbytes),
            self._device.stream(self._out),
            torch.no_grad(),
        ):
            for part, piece in zip(parts, _pieces(source, parts), strict=True):
                part.copy_(piece, non_blocking=True)
            left = self._device.event()
            left.record(self._out)
        sent = _Sent(source.shape, source.stride(), source.dtype, parts, places, leaf, source, left)
        for held, at in places:
            held[at] = sent
        self._sent.setdefault(number, []).append(sent)
        self._leaving.append((number, sent))
        return True

    def release(self, number: int) -> None:
        """Free the GPU memory of what was sent by calls up to this one."""
        current = self._device.current_stream()
        for of, sent in self._leaving:
            if of <= number:
                sent.left.wait(current)
                sent.source = None
        self._leaving = [(of, sent) for of, sent in self._leaving if of > number]

    def fetch(self, number: int) -> None:
        """Begin to copy back what call `number` will need."""
        for sent in self._sent.get(number, ()):
            if sent.source is not None or sent.target is not None:
                continue
            sent.target = torch.empty_strided(sent.shape, sent.stride, dtype=sent.dtype, device=self._device.device)
            # Its memory may be in use until the stream of the layers has come so far
            self._into.wait_stream(self._device.current_stream())
            with (
                spans.device("copy_in", None, self._into, bytes=sent.bytes),
                self._device.stream(self._into),
                torch.no_grad(),
            ):
                for part, piece in zip(sent.parts, _pieces(sent.target, sent.parts), strict=True):
                    piece.copy_(part, non_blocking=True)
                sent.arrived = self._device.event()
                sent.arrived.record(self._into)

    def back(self, number: int) -> None:
        """Put what call `number` needs where it was."""
        self.fetch(number)
        current = self._device.current_stream()
        for sent in self._sent.pop(number, ()):
            tensor = sent.source
            if tensor is None:
                sent.arrived.wait(current)
                tensor = sent.target
            else:  # it has not been freed; but the copy must not outlive it
                sent.left.wait(current)
            assert tensor is not None
            for held, at in sent.places:
                held[at] = tensor.requires_grad_() if sent.leaf else tensor
        self._leaving = [(of, sent) for of, sent in self._leaving if of != number]
        for kept in self._kept.pop(number, ()):
            kept.put_back()

    def end(self) -> None:
        """The group is over, or has failed: forget what is still away, once no copy uses its memory."""
        if self._out is not None:
            with contextlib.suppress(RuntimeError):  # the CUDA context may be broken; then nothing runs in it
                current = self._device.current_stream()
                current.wait_stream(self._out)
                current.wait_stream(self._into)
        self._sent.clear()
        self._kept.clear()
        self._leaving.clear()
        self.host.clear()


def _pieces(tensor: Tensor, parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """The bytes of a contiguous tensor, in pieces as large as `parts`."""
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return flat.split([part.nbytes for part in parts])
