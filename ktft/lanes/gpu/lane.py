"""The GPU lane copies packed experts to the device in chunks, and decodes and multiplies them there.

While one chunk is multiplied, the next one is in flight: buffers of packed bytes take turns, and all chunks share one
buffer of decoded weights. Events order the streams, so the host waits for nothing.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ktft.config import LANE_BYTES
from ktft.device import device_of
from ktft.lanes.decide.placer import Coming
from ktft.lanes.gpu.buffers import Buffers, ChunkLayout
from ktft.lanes.gpu.chunks import Chunk, DecodedChunk, ResidentBlocks, cut, kernels_of
from ktft.lanes.gpu.graphs import Recorded
from ktft.lanes.gpu.prefetched import Prefetched
from ktft.lanes.gpu.returning import Returning
from ktft.lanes.gpu.rings import RingPlace
from ktft.lanes.gpu.steady_chunks import Slots, SteadyChunks, steady_chunks
from ktft.lanes.gpu.transfer import transfer
from ktft.lanes.ops.chunk import chunk_backward, chunk_forward, decode
from ktft.lanes.ops.dropout import room_for_streams, write_streams
from ktft.lanes.ops.interface import by_triton, operations
from ktft.lanes.ops.weights import ChunkWeights, PackedExperts
from ktft.lanes.routes import ChunkRows, Routes, lay_out, piece_rows
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer
from ktft.system import readable

CHUNK_BYTES = 320 << 20
"""The most packed bytes of a chunk. Larger chunks mean fewer kernels for the host to launch in each layer."""


class GpuLane:
    """Runs experts on one device, those that are streamed to it and those that stay there, for all layers of a model.

    Products run on torch's current stream. Any thread may call the lane, and waits until the work of the call before is
    queued. Events then order the work of both on the device, even if the threads use different streams.

    Args:
        device: `cuda`, `cuda:N`, or `cpu`, where plain copies do the same.
        chunk_bytes: the most packed bytes of a chunk; a chunk holds at least one expert.
        limit: the most bytes of the lane's buffers, which are larger only if one expert a chunk needs more.

    Attributes:
        device: with its index.
        transfer: the device's copies.
        residents: the experts that stay on the device; None if there are none.
        returning: LoRA's gradients on their way to host memory.
        used: event after which the products of the last call no longer read the lane's memory.
        mutex: held by whoever gives the device work through the lane, or moves its residents.

    Raises:
        CudaError: CUDA's driver cannot be opened.
        ValueError: the device is neither CUDA nor the CPU.
    """

    def __init__(self, device: torch.device | str, *, chunk_bytes: int = CHUNK_BYTES, limit: int = LANE_BYTES) -> None:
        device = device_of(torch.device(device)).indexed()
        self.device, self.transfer = device, transfer(device)
        self.residents: ResidentBlocks | None = None
        self._buffers = Buffers(self.transfer, chunk_bytes, limit)
        self._ops = operations(device)
        self._recorded = Recorded(device, on=by_triton(device))
        self._ahead = Prefetched(self._buffers)
        self._slots = Slots(device)
        self._steady: weakref.WeakKeyDictionary[ExpertLayer, SteadyChunks] = weakref.WeakKeyDictionary()
        self.returning = Returning(self.transfer)
        self.used, self._arrived = (self.transfer.event() for _ in range(2))
        self.mutex = threading.RLock()
        _LANES.add(self)

    @property
    def bytes(self) -> int:
        """Bytes of the lane's buffers on the device, without the residents."""
        return self._buffers.bytes

    def hold(self, residents: ResidentBlocks | None) -> None:
        """From now on, do not stream these experts, which stay on the device."""
        with self.mutex:
            self.residents = residents
            self._buffers.forget()

    def held(self, layer: ExpertLayer) -> dict[int, int]:
        """The layer's experts that stay on the device, each with the number of its block."""
        with self.mutex:
            return dict(self._held(layer))

    def streams(self, layer: ExpertLayer) -> int:
        """The number of the layer's experts that do not stay on the device."""
        with self.mutex:
            return layer.num_experts - len(self._held(layer))

    def lock(self, layers: Iterable[ExpertLayer], progress: Callable[[str, int], None] | None = None) -> bool:
        """Lock the layers' packed experts in place, at some GB a second. Otherwise each layer's first call does this.

        Calls `progress` with each layer's name and bytes once it is done. Returns whether all are locked. Copies of the
        others go through a locked buffer, which is slower; the log says why.
        """
        locked = True
        for layer in layers:
            locked &= self.transfer.locks.layer(layer)
            if progress is not None:
                progress(layer.name, layer.packed_bytes)
        return locked

    def forward(
        self,
        layer: ExpertLayer,
        experts: Sequence[int],
        routes: Routes,
        hidden: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
        out: Tensor,
    ) -> None:
        """Add what these experts contribute to the layer's output. Returns when the work is queued.

        Args:
            experts: which of the layer's to run. Residents run first, the others in the order of their numbers, so that
                neighbours are copied together.
            routes: of the whole call.
            hidden: `[T, H]` fp32, bf16 or fp16; top_k_weights: `[T, k]` fp32; both contiguous, on the device.
            lora: adapters, CPU tensors `[E, ...]`; they must not change before `settle` or `finish` returns.
            out: fp32 `[T, H]` on the device, added to.

        Raises:
            torch.OutOfMemoryError: the device has no room.
            ValueError: a LoRA tensor cannot be copied.
        """
        with self.using(layer, "forward"):
            for _, chunk in self._chunks(layer, experts, routes, lora):
                chunk_forward(*chunk, hidden, top_k_weights, layer.swiglu, out)

    def backward(
        self,
        layer: ExpertLayer,
        experts: Sequence[int],
        routes: Routes,
        hidden: Tensor,
        grad_output: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
        grad_hidden: Tensor,
        grad_weights: Tensor,
        lora_grads: Sequence[Tensor],
    ) -> None:
        """Add what these experts contribute to the gradients. LoRA's gradients are complete when `finish` returns.

        Args:
            layer, experts, routes, hidden, top_k_weights, lora: as in `forward`.
            grad_output: `[T, H]` fp32, bf16 or fp16, contiguous, on the device.
            grad_hidden, grad_weights: fp32 `[T, H]` and `[T, k]` on the device, added to.
            lora_grads: gradients of a and b of each adapted projection, in the order of `PROJECTIONS`: contiguous fp32
                CPU tensors `[E, ...]`, pinned, or alive long enough to be locked. Only the rows of `experts` are
                written.

        Raises:
            torch.OutOfMemoryError, ValueError: as in `forward`.
            ValueError: a gradient cannot be written.
        """
        self.returning.check(layer, lora, lora_grads)
        with self.using(layer, "backward"):
            for own, chunk in self._chunks(layer, experts, routes, lora):
                grads = chunk_backward(
                    *chunk, hidden, top_k_weights, layer.swiglu, grad_output, grad_hidden, grad_weights
                )
                self.returning.give_back(own, grads, lora_grads)

    def finish(self) -> None:
        """Wait until all gradients of LoRA are in host memory. LoRA's tensors may change then, too."""
        with self.mutex:
            wait = self.returning.arrival_of_all()
        wait()
        self.settle()

    def arrival(self) -> Callable[[], None]:
        """A function that waits until the gradients of all calls so far are in host memory, and of no later ones."""
        with self.mutex:
            return self.returning.arrival_so_far()

    def settle(self) -> None:
        """Wait until all calls so far have copied LoRA's tensors, which may change then."""
        self._arrived.synchronize()

    def prefetch(self, layer: ExpertLayer, experts: Sequence[int], lora: ExpertLora | None) -> None:
        """Begin to copy packed experts that the layer's next call probably needs, as many as the buffers hold.

        That call begins with these chunks, up to the first chunk with an expert whose rows it does not compute. A call
        of another layer drops them all. `lora` are the adapters of that call, of which nothing is copied yet.
        """
        with self.using(layer, "prefetch"):
            if self._ahead.chunks or not self.streams(layer):
                return
            layout, held = self._layout(layer, lora), self._held(layer)
            self._ahead.fill(cut(layout, sorted(e for e in experts if e not in held)))

    def prefetch_steady(self, layer: ExpertLayer, lora: ExpertLora | None, adapters: bool) -> bool:
        """Begin to copy what the layer's next call needs if it is steady: packed experts and, with `adapters`, LoRA, of
        as many chunks as the buffers hold. LoRA that changes before the call is copied again.

        Returns whether all these packed experts were there already.
        """
        with self.using(layer, "prefetch"):
            known = self._steady_chunks(layer, lora)
            if adapters and lora is not None and not self._ahead.has_adapters():
                self._ahead.fill_adapters(known.layout, lora, known.chunks)
                self._arrived.record(self.transfer.into)
            before = self.transfer.copied_bytes
            if not self._ahead.chunks:
                self._ahead.fill(known.to_copy())
            return self.transfer.copied_bytes == before

    def prefetch_beside(self, layer: ExpertLayer, lora: ExpertLora | None) -> None:
        """Begin to copy packed experts that a steady call of this layer needs after the call that is prefetched."""
        with self.using(layer, "prefetch"):
            self._ahead.fill_beside(self._steady_chunks(layer, lora).to_copy())

    def forget(self) -> None:
        """Drop what was prefetched, so that the next call begins with nothing in flight."""
        with self.mutex:
            self._ahead.forget()

    def coming(self, layer: ExpertLayer, lora: ExpertLora | None) -> Coming:
        """The experts that `prefetch` began to copy for a call of this layer with these adapters."""
        with self.mutex:
            return self._ahead.coming(self._layout(layer, lora)) if self._ahead.chunks else Coming()

    def _chunks(
        self, layer: ExpertLayer, experts: Sequence[int], routes: Routes, lora: ExpertLora | None
    ) -> Iterator[tuple[list[int], tuple[ChunkWeights, ExpertLora | None, ChunkRows]]]:
        """The experts in chunks: their numbers, and the first arguments of `chunk_forward`. The caller must have queued
        a chunk's products when it asks for the next one.
        """
        chunks = self._cut_up(layer, self._layout(layer, lora), experts, routes.counts)
        limit = piece_rows(layer.hidden_size, layer.intermediate_size)
        rows = lay_out(routes, [chunk.experts for chunk in chunks], limit)
        for decoded, chunk_rows in zip(self.decoded(layer, chunks, lora), rows, strict=True):
            yield decoded.experts, (decoded.weights, decoded.adapters, chunk_rows)

    def chunk_count(self, layer: ExpertLayer, lora: ExpertLora | None) -> int:
        """How many chunks all experts of a layer make, if none stays on the device."""
        with self.mutex:
            return -(-layer.num_experts // self._layout(layer, lora).capacity)

    def all_chunks(self, layer: ExpertLayer, lora: ExpertLora | None) -> list[Chunk]:
        """All experts of a layer in chunks, the same in every call, for `decoded` or `at_once`. Call it within
        `using`.
        """
        chunks = [replace(chunk) for chunk in self._steady_chunks(layer, lora).chunks]
        self._ahead.give_to(chunks, lora)
        return chunks

    def _steady_chunks(self, layer: ExpertLayer, lora: ExpertLora | None) -> SteadyChunks:
        layout, residents = self._layout(layer, lora), self.residents
        moved, known = residents.moved if residents is not None else 0, self._steady.get(layer)
        if known is not None and known.layout is layout and known.moved == moved:
            return known
        slots = self._slots if layout.blocks else None
        self._steady[layer] = known = steady_chunks(layout, moved, layer.num_experts, self._held(layer), slots)
        return known

    def go_at_once(self, chunks: Sequence[Chunk]) -> bool:
        """Whether `at_once` takes these chunks of a layer: half of the buffers, beside those of the layer before, has
        room for all, and most experts are residents. If more stream in, the next copies should not wait for products.
        """
        if not chunks:
            return True
        layout, streaming = chunks[0].layout, [chunk for chunk in chunks if chunk.streamed]
        fit = not layout.adapters or len(chunks) <= len(layout.adapters) // 2
        few = all(2 * len(chunk.streamed) <= len(chunk.experts) for chunk in streaming)
        return fit and few and len(streaming) <= len(layout.packed) // 2

    @contextlib.contextmanager
    def at_once(
        self, layer: ExpertLayer, chunks: Sequence[Chunk], lora: ExpertLora | None, rows_each: float = math.inf
    ) -> Iterator[list[DecodedChunk]]:
        """A block that queues all chunks of a layer, each with what is `left` of it. Use it within `using`. If experts
        have few rows each, on average, their weights are not decoded, but multiplied where they are packed.
        """
        compute, slots = self.transfer.compute(), self._steady[layer].slots
        self.used.wait(compute)
        parts: Sequence[Tensor | None] = [None] * len(chunks)
        if slots is not None and self.residents is not None:
            self.residents.arrived.wait(compute)
            own = self._buffers.slots[: len(slots)]
            own.copy_(slots)
            parts = own.split([len(chunk.experts) for chunk in chunks])
        found = []
        for chunk, part in zip(map(self._begun, chunks), parts, strict=True):
            if chunk.packed is not None:
                chunk.packed.wait(compute)
            found.append(self._decoding(layer, chunk, part, rows_each))
            if lora is not None and chunk.adapters is not None:
                chunk.adapters.wait(compute)
                found[-1].place(chunk, chunk.adapters, lora)
        yield found
        for chunk in chunks:
            for place in (chunk.packed, chunk.adapters):
                if place is not None:
                    place.buffer.free.record(compute)
        self._arrived.record(self.transfer.into)
        self.used.record(compute)

    def decoded(
        self,
        layer: ExpertLayer,
        chunks: Sequence[Chunk],
        lora: ExpertLora | None,
        fuse: bool = False,
        rows_each: float = math.inf,
    ) -> Iterator[DecodedChunk]:
        """Each chunk's decoded weights and its adapters on the device. Call it within `using`, and queue a chunk's
        products before asking for the next one.

        `fuse` leaves the decoding of residents, and the writing of adapters beside weights, to the caller, who does it
        in one launch with the products. `rows_each` is as of `at_once`, but what streams in is decoded.
        """
        compute = self.transfer.compute()
        if lora is not None and lora.dropout > 0 and lora.streams is None:
            lora = replace(lora, streams=write_streams(lora, room_for_streams(self.device)))
        waiting = map(self._begun, chunks)  # a chunk's copies begin when it is asked for
        self.used.wait(compute)
        coming = next(waiting, None)
        while coming is not None:
            now, coming = coming, next(waiting, None)
            found = self._decode(layer, now, compute, rows_each if fuse and now.packed is None else math.inf)
            if now.packed is not None or not fuse:  # the next copy may take its place, as soon as it is decoded
                self._finish(found, now.packed, compute)
            if lora is not None and now.adapters is not None:
                now.adapters.wait(compute)
                found.place(now, now.adapters, lora)
            if not fuse:
                self._finish(found, now.adapters, compute)
            yield found
            if fuse:
                self._finish(found, now.adapters, compute)
        self._arrived.record(self.transfer.into)
        self.used.record(compute)

    def _finish(self, decoded: DecodedChunk, place: RingPlace | None, compute: object) -> None:
        """Do what is left for a chunk, and give back the place that it was copied to."""
        while decoded.left:
            self._recorded.run(*decoded.left.pop(0))
        if place is not None:
            place.buffer.free.record(compute)

    def _begun(self, chunk: Chunk) -> Chunk:
        """The chunk, whose copies have begun."""
        layout = chunk.layout
        if chunk.packed is None and chunk.streamed:
            chunk.packed = self._buffers.packed.fill(layout.packed, chunk.streamed)
        if chunk.adapters is None and layout.adapters:
            chunk.adapters = self._buffers.adapters.fill(layout.adapters, chunk.experts)
        return chunk

    def _cut_up(
        self, layer: ExpertLayer, layout: ChunkLayout, experts: Sequence[int], counts: Sequence[int]
    ) -> list[Chunk]:
        """All chunks of this call: those that were prefetched and that it needs, then residents, then the rest."""
        wanted = set(experts).union(e for e, rows in enumerate(counts) if not rows)
        ahead = self._ahead.take(layout, wanted)
        left, held = set(experts).difference(*(chunk.experts for chunk in ahead)), self._held(layer)
        residents = list(cut(layout, sorted(e for e in left if e in held)))
        for chunk in residents:
            chunk.slots, chunk.streamed = self._slots.of(tuple(held[expert] for expert in chunk.experts)), []
        return [*ahead, *residents, *cut(layout, sorted(e for e in left if e not in held))]

    def _layout(self, layer: ExpertLayer, lora: ExpertLora | None) -> ChunkLayout:
        return self._buffers.layout(layer, lora, self.residents.blocks if self.residents is not None else None)

    def _held(self, layer: ExpertLayer) -> dict[int, int]:
        return self.residents.slots(layer) if self.residents is not None else {}

    def _decode(self, layer: ExpertLayer, chunk: Chunk, compute: object, rows_each: float) -> DecodedChunk:
        slots = None
        if chunk.packed is not None:
            chunk.packed.wait(compute)
        if chunk.slots is not None:
            assert self.residents is not None
            self.residents.arrived.wait(compute)
            slots = self._buffers.slots[: len(chunk.experts)]
            slots.copy_(chunk.slots)
        return self._decoding(layer, chunk, slots, rows_each)

    def _decoding(self, layer: ExpertLayer, chunk: Chunk, slots: Tensor | None, rows_each: float) -> DecodedChunk:
        """A chunk that is left to be decoded; `slots` are its own, in memory that recorded kernels read."""
        layout, count = chunk.layout, len(chunk.experts)
        weights, place = layout.decoded(count), chunk.packed or layout.packed[0]
        blocks, addresses, held = place.first(count), place.addresses, list[Tensor]()
        if slots is not None:
            blocks, held = place.views, layout.blocks
            addresses = *addresses, *(each.data_ptr() for each in (slots, *held))
        packed = PackedExperts(layer.format, layout.slices, blocks, slots, held)
        if in_place := self._ops.reads_packed(layer.format, rows_each):
            weights = replace(weights, packed=packed)
        work = partial(decode, packed, weights, self._ops)
        return DecodedChunk(chunk.experts, weights, left=[kernels_of(chunk, addresses, work, in_place)])

    @contextlib.contextmanager
    def using(self, layer: ExpertLayer, work: str) -> Iterator[None]:
        """Allow one call at a time. If it fails, no copy is left in flight, and the error for a lack of memory says
        where; `ktft.train.out_of_memory` says what to do.
        """
        with self.mutex:
            try:
                yield
            except BaseException as error:
                self._ahead.forget()
                with contextlib.suppress(RuntimeError):  # the CUDA context may be broken; then nothing runs in it
                    self.transfer.synchronize()
                if isinstance(error, torch.OutOfMemoryError):
                    raise torch.OutOfMemoryError(self._short_of_memory(layer, work, error)) from error
                raise

    def _short_of_memory(self, layer: ExpertLayer, work: str, error: Exception) -> str:
        room = device_of(self.device).free_bytes()
        free = f"{readable(room[0])} of {readable(room[1])} are free" if room else "no memory is left"
        residents = readable(self.residents.bytes if self.residents else 0)
        return (
            f"CUDA out of memory in the GPU lane on {self.device}, {work} of {layer.name}: its buffers hold "
            f"{readable(self.bytes)}, residents {residents}, {free}. torch says: " + str(error).partition("\n")[0]
        )


_LANES: weakref.WeakSet[GpuLane] = weakref.WeakSet()


@contextlib.contextmanager
def adapters_at_rest() -> Iterator[None]:
    """A block in which no lane of the process reads LoRA's tensors, so that an optimizer may write them.

    It begins when copies in flight are done; another thread's call waits until it ends.
    """
    with contextlib.ExitStack() as held:
        for lane in list(_LANES):
            held.enter_context(lane.mutex)
            lane.settle()
        yield
