"""Steady passes: all experts of a layer run on the GPU, in the same chunks in every call, and routing stays there.

Which rows an expert has is then known to the device alone, which sorts them. So no pass waits for the host, and the
kernels of a pass are the same in every call: they are recorded once for all layers of a kind. Only the copies of
streamed experts lie between them. A call's tensors are copied to memory that the recordings read.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ktft.lanes.gpu.chunks import Chunk
from ktft.lanes.gpu.graphs import Recorded
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.ops.chunk import chunk_backward, chunk_forward, is_grouped
from ktft.lanes.ops.interface import by_triton
from ktft.lanes.ops.weights import ChunkWeights
from ktft.lanes.routes import Piece, piece_rows
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer

SIZES = 8
"""The most sizes of calls that are steady: each needs memory of its own."""


class Memory:
    """What recordings of calls of one size read and write. T tokens have k slots each, for E experts.

    Attributes:
        hidden, grad_output: `[T, H]`.
        index: `[T, k]` int64; weights: `[T, k]` fp32.
        order: `[E]` int16: each expert's place among those of all chunks.
        total, grad_weights: fp32 `[T, H]` and `[T, k]`: the sums that a pass makes.
    """

    def __init__(self, hidden: Tensor, top_k: int, experts: int) -> None:
        (tokens, _), device = hidden.shape, hidden.device
        self.hidden, self.grad_output = torch.empty_like(hidden), torch.empty_like(hidden)
        self.index = torch.zeros(tokens, top_k, dtype=torch.int64, device=device)
        self.weights, self.grad_weights = (torch.zeros(tokens, top_k, device=device) for _ in range(2))
        self.order = torch.zeros(experts, dtype=torch.int16, device=device)
        self.total = torch.zeros(hidden.shape, device=device)
        self._numbers = torch.arange(tokens * top_k, device=device)
        self._ones = torch.ones(tokens * top_k, dtype=torch.int32, device=device)
        self._pieces: dict[tuple[int, ...], list[Piece]] = {}
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

    def pieces(self, sizes: tuple[int, ...]) -> list[Piece]:
        """The rows of chunks of so many experts, as `sort` leaves them."""
        if sizes not in self._pieces:
            rows, device = len(self._numbers), self.order.device

            def numbers(count: int) -> Tensor:
                return torch.zeros(count, dtype=torch.int32, device=device)

            top_k = self.index.shape[1]
            self._pieces[sizes] = [Piece(0, None, numbers(size), numbers(rows), numbers(rows), top_k) for size in sizes]
        return self._pieces[sizes]

    def begin(self, sizes: tuple[int, ...]) -> None:
        """Sort the routes by expert, for chunks of so many, and clear the sums."""
        rows = len(self._numbers)
        self.total.zero_()
        self.grad_weights.zero_()
        places = self.order[self.index.view(-1)]
        by_row = torch.sort(places, stable=True).indices  # a radix sort of few bits is short
        counts = torch.zeros(len(self.order), dtype=torch.int32, device=places.device)
        ends = counts.scatter_add_(0, places.long(), self._ones).cumsum(0)
        row_of = torch.empty_like(by_row).scatter_(0, by_row, self._numbers)
        begin, first = torch.zeros_like(ends[0]), 0
        for piece, size in zip(self.pieces(sizes), sizes, strict=True):
            end = ends[first + size - 1]
            piece.ends.copy_(ends[first : first + size] - begin)
            piece.row_route.copy_(by_row[(self._numbers + begin).clamp(max=rows - 1)])
            piece.route_row.copy_(torch.where((row_of >= begin) & (row_of < end), row_of - begin, rows))
            begin, first = end, first + size


class SteadyLane:
    """Runs steady passes on a lane's device, for all layers of a model."""

    def __init__(self, lane: GpuLane) -> None:
        self._lane = lane
        self._by_device = by_triton(lane.device)
        self._recorded = Recorded(lane.device, on=self._by_device)
        self._memory: dict[tuple[object, ...], Memory] = {}
        self._uses: Counter[tuple[ExpertLayer, tuple[int, ...]]] = Counter()
        self._sizes: set[tuple[int, ...]] = set()
        self._lora_grads: dict[tuple[int, int], tuple[Tensor, Any]] = {}

    def takes(self, layer: ExpertLayer, tokens: int, top_k: int, lora: ExpertLora | None) -> bool:
        """Whether calls of this size may be steady.

        Their rows must fit in one piece of each chunk. LoRA's dropout has other numbers in each call, and products of
        groups that torch makes one by one need to know them.
        """
        few = tokens * top_k <= piece_rows(layer.hidden_size, layer.intermediate_size)
        drops = lora is not None and lora.dropout > 0
        fits = few and not drops and layer.held.every_route and (not self._by_device or is_grouped(self._lane.device))
        return fits and self._comes_again(layer, tokens, top_k)

    def _comes_again(self, layer: ExpertLayer, tokens: int, top_k: int) -> bool:
        """Whether the layer had calls of this size before, and there is memory for them or some may be made."""
        size = layer.num_experts, layer.hidden_size, top_k, tokens
        self._uses[layer, size] += 1
        known = size in self._sizes
        if not known and self._uses[layer, size] > 1 and len(self._sizes) < SIZES:
            self._sizes.add(size)
            known = True
        return known

    def forward(
        self, layer: ExpertLayer, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: ExpertLora | None
    ) -> Tensor:
        """The layer's output `[T, H]`, in the dtype of `hidden`. Returns when the work is queued.

        Args:
            hidden: `[T, H]` on the device; top_k_index: `[T, k]`; top_k_weights: `[T, k]` fp32.
            lora: as in `GpuLane.forward`.

        Raises:
            torch.OutOfMemoryError, ValueError: as in `GpuLane.forward`.
        """
        with self._lane.using(layer, "forward"), torch.inference_mode(False), torch.no_grad():
            memory, chunks, key = self._begun(layer, hidden, top_k_index, top_k_weights, lora)
            for number, decoded in enumerate(self._lane.decoded(layer, chunks, lora, fuse=True)):
                rows, own = self._rows(memory, key[1], number), decoded.adapters
                given = decoded.weights, own, rows, memory.hidden, memory.weights, layer.swiglu, memory.total
                whole = self._key("forward", layer, chunks[number], own, number, key)
                decoded.run(self._recorded, whole, partial(chunk_forward, *given))
            return memory.total.to(hidden.dtype, copy=True)

    def backward(
        self,
        layer: ExpertLayer,
        hidden: Tensor,
        grad_output: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
        lora_grads: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """The gradients of hidden states, in their dtype, and of routing weights, fp32. LoRA's are complete, for all
        experts, when `GpuLane.finish` returns.

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
            memory.grad_output.copy_(grad_output)
            for number, decoded in enumerate(self._lane.decoded(layer, chunks, lora, fuse=True)):
                own = decoded.adapters
                buffer, returned = self._buffer(number, own)
                returned.wait(self._lane.transfer.compute())
                rows = self._rows(memory, key[1], number)
                work = partial(_backward, decoded.weights, own, rows, layer, memory, buffer)
                decoded.run(self._recorded, self._key("backward", layer, chunks[number], own, number, key), work)
                self._lane.give_back(decoded.experts, _views(buffer, own), lora_grads)
                returned.record(self._lane.transfer.out)
            return memory.total.to(hidden.dtype, copy=True), memory.grad_weights.clone()

    def _begun(
        self, layer: ExpertLayer, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor, lora: ExpertLora | None
    ) -> tuple[Memory, list[Chunk], tuple[object, tuple[int, ...]]]:
        """The memory of a pass with its input, its chunks, and what its kernels depend on."""
        size = hidden.shape, hidden.dtype, top_k_index.shape[1], layer.num_experts
        if size not in self._memory:
            self._memory[size] = Memory(hidden.detach(), top_k_index.shape[1], layer.num_experts)
        memory, chunks = self._memory[size], self._lane.all_chunks(layer, lora)
        memory.hidden.copy_(hidden)
        memory.index.copy_(top_k_index)
        memory.weights.copy_(top_k_weights)
        sizes = memory.arrange(chunks)
        self._recorded.run(("begin", size, sizes), partial(memory.begin, sizes))
        return memory, chunks, (size, sizes)

    def _rows(self, memory: Memory, sizes: tuple[int, ...], number: int) -> list[Piece]:
        piece = memory.pieces(sizes)[number]
        if self._by_device:
            return [piece]
        # torch's own operations have no bound for rows: they get as many as there are
        rows = int(piece.ends[-1])
        return [Piece(0, None, piece.ends, piece.row_route[:rows], piece.route_row, piece.top_k)] if rows else []

    @staticmethod
    def _key(
        work: str, layer: ExpertLayer, chunk: Chunk, own: ExpertLora | None, number: int, key: tuple[object, ...]
    ) -> tuple[object, ...] | None:
        """Everything that a chunk's kernels depend on; None if its number of experts changes often."""
        if len(chunk.experts) != chunk.layout.capacity:
            return None
        scalings = tuple(pair.scaling for pair in own.pairs.values()) if own is not None else ()
        return work, layer.swiglu, chunk.layout.kind, number, *scalings, *key

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
