"""Steady passes: all experts of a layer run on the GPU, in the same chunks in every call, and routing stays there.

Which rows an expert has is then known to the device alone, which sorts them. So no pass waits for the host, and the
kernels of a pass are the same in every call: they are recorded once for all layers of a kind. Only the copies of
streamed experts lie between them. A call's tensors are copied to memory that the recordings read.

Every chunk is computed in as many pieces as all rows of the call would need, since nobody but the device knows how many
rows it has. Kernels of pieces without rows end at once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ktft.device import device_of
from ktft.lanes.gpu.chunks import Chunk
from ktft.lanes.gpu.graphs import Recorded
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.ops.chunk import chunk_backward, chunk_forward, is_grouped
from ktft.lanes.ops.dropout import room_for_streams, write_streams
from ktft.lanes.ops.interface import by_triton
from ktft.lanes.ops.weights import ChunkWeights
from ktft.lanes.routes import Piece, piece_rows
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer

FP32, INT32, INT64 = 4, 4, 8
_FACTOR = 0x5851F42D4C957F2D  # that of D. Knuth's MMIX generator, odd and of many bits
SIZES, SIZES_BYTES = 8, 1 << 30
"""The most sizes of calls that are steady, and of bytes for them: each size needs memory of its own."""
EMPTY_PIECES = 32
"""The most pieces without rows of a steady pass. On an H100 each takes some 40 µs forward and backward, and the host's
wait for the routing some 4 ms.
"""


def call_bytes(tokens: int, top_k: int, hidden_size: int, value_bytes: int) -> int:
    """Bytes that `Memory` takes, without what depends on the cut, which is less."""
    return tokens * (hidden_size * (2 * value_bytes + FP32) + top_k * (3 * INT64 + 2 * FP32 + INT32))


def empty_pieces(rows: int, chunks: int, hidden_size: int, intermediate_size: int) -> int:
    """The most pieces without rows of a steady pass."""
    pieces = -(-rows // piece_rows(hidden_size, intermediate_size))
    return chunks * pieces - max(chunks, pieces)


class CutRows(NamedTuple):
    """How the rows of a call are cut: the number of experts of each chunk, and the most rows of a piece."""

    sizes: tuple[int, ...]
    rows: int


class Memory:
    """What recordings of calls of one size read and write. T tokens have k slots each, for E experts.

    Attributes:
        hidden, grad_output: `[T, H]`.
        index: `[T, k]` int64; weights: `[T, k]` fp32.
        order: `[E]` int16: each expert's place among those of all chunks.
        total, grad_weights: fp32 `[T, H]` and `[T, k]`: the sums that a pass makes.
        told: `[E + 3]` int64, what the host asks of a pass, later: see `PassReport`.
    """

    def __init__(self, hidden: Tensor, top_k: int, experts: int) -> None:
        (tokens, _), device = hidden.shape, hidden.device
        self.hidden, self.grad_output = torch.empty_like(hidden), torch.empty_like(hidden)
        self.index = torch.zeros(tokens, top_k, dtype=torch.int64, device=device)
        self.weights, self.grad_weights = (torch.zeros(tokens, top_k, device=device) for _ in range(2))
        self.order = torch.zeros(experts, dtype=torch.int16, device=device)
        self.total = torch.zeros(hidden.shape, device=device)
        self.told = torch.zeros(experts + 3, dtype=torch.int64, device=device)
        self._numbers = torch.arange(tokens * top_k, device=device)
        mixed = (self._numbers + 1) * _FACTOR
        self._factors = (mixed ^ mixed >> 29) * _FACTOR | 1
        self._ones = torch.ones(tokens * top_k, dtype=torch.int32, device=device)
        self._chunks: dict[CutRows, list[_ChunkMemory]] = {}
        self._orders: dict[tuple[int, ...], Tensor] = {}
        self._ordered: tuple[int, ...] = ()

    def arrange(self, chunks: Sequence[Chunk]) -> tuple[int, ...]:
        """Take the experts in this order. Returns the number of each chunk's."""
        experts = tuple(itertools.chain.from_iterable(chunk.experts for chunk in chunks))
        if experts not in self._orders:
            places = torch.empty(len(experts), dtype=torch.int16)
            places[list(experts)] = torch.arange(len(experts), dtype=torch.int16)
            self._orders[experts] = places.to(self.order.device)
        if experts != self._ordered:
            self.order.copy_(self._orders[experts])
            self._ordered = experts
        return tuple(len(chunk.experts) for chunk in chunks)

    def chunks(self, cut: CutRows) -> list[list[Piece]]:
        """The rows of each chunk's experts, as `begin` leaves them."""
        return [chunk.pieces for chunk in self._of(cut)]

    def _of(self, cut: CutRows) -> list[_ChunkMemory]:
        if cut not in self._chunks:
            rows, top_k = len(self._numbers), self.index.shape[1]
            self._chunks[cut] = [_ChunkMemory(size, rows, cut.rows, top_k, self.order.device) for size in cut.sizes]
        return self._chunks[cut]

    def begin(self, cut: CutRows) -> None:
        """Sort the routes by expert, for chunks and pieces of this cut, clear the sums, and note what the host asks."""
        rows = len(self._numbers)
        self.total.zero_()
        self.grad_weights.zero_()
        places = self.order[self.index.view(-1)]
        by_row = torch.sort(places, stable=True).indices  # a radix sort of few bits is short
        counts = torch.zeros(len(self.order), dtype=torch.int32, device=places.device)
        ends = counts.scatter_add_(0, places.long(), self._ones).cumsum(0)
        self._tell(counts)
        row_of = torch.empty_like(by_row).scatter_(0, by_row, self._numbers)
        begin, first = torch.zeros_like(ends[0]), 0
        for chunk, size in zip(self._of(cut), cut.sizes, strict=True):
            end = ends[first + size - 1]
            own = ends[first : first + size] - begin
            chunk.ends.copy_((own - chunk.begins).clamp(0, cut.rows))
            chunk.row_route.copy_(by_row[(self._numbers + begin).clamp(max=rows - 1)])
            chunk.route_row.copy_(torch.where((row_of >= begin) & (row_of < end), row_of - begin, rows))
            begin, first = end, first + size

    def _tell(self, counts: Tensor) -> None:
        """`counts` are the numbers of rows of the experts in the order of the chunks."""
        bad = (self.hidden - self.hidden).sum(1) != 0  # of NaN and Inf the difference is NaN, of all else 0
        first = (bad.to(torch.int32).argmax() + 1) * bad.any() - 1
        routing = (self.index.view(-1) * self._factors).sum()
        self.told.copy_(torch.cat((counts[self.order.long()], torch.stack((self.index.min(), first, routing)))))


class PassReport(NamedTuple):
    """What a pass tells the host. Nobody waits for it: it is looked at once a step.

    Attributes:
        counts: how many rows each expert has.
        lowest: the lowest expert number of a token.
        bad_token: the first token whose hidden states hold NaN or Inf; -1 if none does.
        routing: another number, most likely, if a token goes to another expert.
    """

    counts: list[int]
    lowest: int
    bad_token: int
    routing: int

    @classmethod
    def of(cls, found: list[int]) -> PassReport:
        """From the numbers of `Memory.told`."""
        return cls(found[:-3], *found[-3:])


class _ChunkMemory:
    """The rows of one chunk's experts, in P pieces that have room for all R rows of a call.

    Attributes:
        begins: `[P, 1]`: the number of each piece's first row.
        ends: int32 `[P, G]`; row_route, route_row: int32 `[R]`; all as of `Piece`.
    """

    def __init__(self, experts: int, rows: int, most: int, top_k: int, device: torch.device) -> None:
        begins = range(0, rows, most)
        self.begins = torch.tensor(begins, device=device)[:, None]
        self.ends = torch.zeros(len(begins), experts, dtype=torch.int32, device=device)
        self.row_route, self.route_row = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
        parts = zip(begins, self.ends, self.row_route.split(most), strict=True)
        self.pieces = [Piece(begin, None, ends, part, self.route_row, top_k) for begin, ends, part in parts]


class SteadyLane:
    """Runs steady passes on a lane's device, for all layers of a model."""

    def __init__(self, lane: GpuLane) -> None:
        self._lane = lane
        self._by_device = by_triton(lane.device)
        self._recorded = Recorded(lane.device, on=self._by_device)
        self._memory: dict[tuple[object, ...], Memory] = {}
        self._uses: Counter[tuple[ExpertLayer, tuple[object, ...]]] = Counter()
        self._sizes: dict[tuple[object, ...], int] = {}  # and the bytes of each
        self._lora_grads: dict[tuple[int, int], tuple[Tensor, Any]] = {}
        self._streams = room_for_streams(lane.device)

    def takes(self, layer: ExpertLayer, hidden: Tensor, top_k: int, lora: ExpertLora | None) -> bool:
        """Whether calls with hidden states of this size may be steady. Products of groups that torch makes one by one
        need to know how many rows each has.
        """
        fits = layer.held.every_route and (not self._by_device or is_grouped(self._lane.device))
        return fits and self._comes_again(layer, hidden, top_k, lora)

    def _comes_again(self, layer: ExpertLayer, hidden: Tensor, top_k: int, lora: ExpertLora | None) -> bool:
        """Whether the layer had calls of this size before, and there is memory for them or some may be made."""
        size = layer.num_experts, layer.hidden_size, layer.intermediate_size, top_k, len(hidden), hidden.dtype
        self._uses[layer, size] += 1
        if size not in self._sizes and self._uses[layer, size] > 1 and len(self._sizes) < SIZES:
            needed = call_bytes(len(hidden), top_k, layer.hidden_size, hidden.element_size())
            chunks = self._lane.chunk_count(layer, lora)
            empty = empty_pieces(len(hidden) * top_k, chunks, layer.hidden_size, layer.intermediate_size)
            if self._has_room(needed) and empty <= EMPTY_PIECES:
                self._sizes[size] = needed
        return size in self._sizes

    def _has_room(self, needed: int) -> bool:
        """Whether another size may take so many bytes, and as many again are left."""
        free = device_of(self._lane.device).free_bytes()
        return sum(self._sizes.values()) + needed <= SIZES_BYTES and (free is None or free[0] >= 2 * needed)

    def forward(
        self, layer: ExpertLayer, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: ExpertLora | None
    ) -> tuple[Tensor, Tensor]:
        """The layer's output `[T, H]`, in the dtype of `hidden`, and what makes a `PassReport`. Returns when the work
        is queued.

        Args:
            hidden: `[T, H]` on the device; top_k_index: `[T, k]`; top_k_weights: `[T, k]` fp32.
            lora: as in `GpuLane.forward`.

        Raises:
            torch.OutOfMemoryError, ValueError: as in `GpuLane.forward`.
        """
        with self._lane.using(layer, "forward"), torch.inference_mode(False), torch.no_grad():
            memory, chunks, key = self._begun(layer, hidden, top_k_index, top_k_weights, lora)
            lora = self._with_streams(lora)
            pieces = memory.chunks(key[1])
            for number, decoded in enumerate(self._lane.decoded(layer, chunks, lora, fuse=True)):
                rows, own = self._rows(pieces[number]), decoded.adapters
                given = decoded.weights, own, rows, memory.hidden, memory.weights, layer.swiglu, memory.total
                whole = self._key("forward", layer, chunks[number], own, number, key)
                decoded.run(self._recorded, whole, partial(chunk_forward, *given))
            return memory.total.to(hidden.dtype, copy=True), memory.told.clone()

    def backward(
        self,
        layer: ExpertLayer,
        hidden: Tensor,
        grad_output: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
        lora_grads: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of hidden states, in their dtype, and of routing weights, fp32; and what makes a `PassReport`.
        LoRA's gradients are complete, for all experts, when `GpuLane.finish` returns.

        Args:
            layer, hidden, top_k_index, top_k_weights, lora: as in `forward`.
            grad_output: `[T, H]` on the device.
            lora_grads: as in `GpuLane.backward`.

        Raises:
            torch.OutOfMemoryError, ValueError: as in `GpuLane.backward`.
        """
        self._lane.check(layer, lora, lora_grads)
        with self._lane.using(layer, "backward"), torch.inference_mode(False), torch.no_grad():
            memory, chunks, key = self._begun(layer, hidden, top_k_index, top_k_weights, lora)
            lora = self._with_streams(lora)
            memory.grad_output.copy_(grad_output)
            pieces = memory.chunks(key[1])
            for number, decoded in enumerate(self._lane.decoded(layer, chunks, lora, fuse=True)):
                own = decoded.adapters
                buffer, returned = self._buffer(number, own)
                returned.wait(self._lane.transfer.compute())
                work = partial(_backward, decoded.weights, own, self._rows(pieces[number]), layer, memory, buffer)
                decoded.run(self._recorded, self._key("backward", layer, chunks[number], own, number, key), work)
                self._lane.give_back(decoded.experts, _views(buffer, own), lora_grads)
                returned.record(self._lane.transfer.out)
            of_hidden = memory.total.to(hidden.dtype, copy=True)
            return of_hidden, memory.grad_weights.clone(), memory.told.clone()

    def _begun(
        self, layer: ExpertLayer, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: ExpertLora | None
    ) -> tuple[Memory, list[Chunk], tuple[object, CutRows]]:
        """The memory of a pass with its input, its chunks, and what its kernels depend on."""
        size = hidden.shape, hidden.dtype, top_k_index.shape[1], layer.num_experts
        if size not in self._memory:
            self._memory[size] = Memory(hidden.detach(), top_k_index.shape[1], layer.num_experts)
        memory, chunks = self._memory[size], self._lane.all_chunks(layer, lora)
        memory.hidden.copy_(hidden)
        memory.index.copy_(top_k_index)
        memory.weights.copy_(top_k_weights)
        cut = CutRows(memory.arrange(chunks), piece_rows(layer.hidden_size, layer.intermediate_size))
        self._recorded.run(("begin", size, cut), partial(memory.begin, cut))
        return memory, chunks, (size, cut)

    def _with_streams(self, lora: ExpertLora | None) -> ExpertLora | None:
        """The adapters with this call's dropout where recordings look for it."""
        if lora is None or lora.dropout <= 0:
            return lora
        return replace(lora, streams=write_streams(lora, self._streams))

    def _rows(self, pieces: list[Piece]) -> list[Piece]:
        if self._by_device:
            return pieces
        # torch's own operations have no bound for rows: they get as many as there are
        counts = [int(piece.ends[-1]) for piece in pieces]
        return [replace(each, row_route=each.row_route[:n]) for each, n in zip(pieces, counts, strict=True) if n]

    @staticmethod
    def _key(
        work: str, layer: ExpertLayer, chunk: Chunk, own: ExpertLora | None, number: int, key: tuple[object, ...]
    ) -> tuple[object, ...] | None:
        """Everything that a chunk's kernels depend on; None if its number of experts changes often."""
        if len(chunk.experts) != chunk.layout.capacity:
            return None
        numbers = (own.dropout, *(pair.scaling for pair in own.pairs.values())) if own is not None else ()
        return work, layer.swiglu, chunk.layout.kind, number, *numbers, *key

    def _buffer(self, number: int, own: ExpertLora | None) -> tuple[Tensor, Any]:
        """Memory for the gradients of a chunk's LoRA, and the event after which they have left it."""
        count = sum(each.numel() for each in own.parameters()) if own is not None else 0
        if (number, count) not in self._lora_grads:
            made = torch.empty(count, device=self._lane.device)
            self._lora_grads[number, count] = made, self._lane.transfer.event()
        return self._lora_grads[number, count]


def _backward(
    weights: ChunkWeights,
    own: ExpertLora | None,
    rows: list[Piece],
    layer: ExpertLayer,
    memory: Memory,
    buffer: Tensor,
) -> None:
    if not rows:
        buffer.zero_()
        return
    chunk_backward(
        weights, own, rows, memory.hidden, memory.weights, layer.swiglu, memory.grad_output, memory.total,
        memory.grad_weights, lora_grads=buffer,
    )  # fmt: skip


def _views(buffer: Tensor, own: ExpertLora | None) -> list[Tensor]:
    """The gradients of each adapter's a and b in a buffer."""
    shapes = [each.shape for each in own.parameters()] if own is not None else []
    parts = buffer.split([shape.numel() for shape in shapes]) if shapes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
