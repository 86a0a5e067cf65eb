"""Steady passes: all experts of a layer run on the GPU, in the same chunks in every call, and routing stays there.

Which rows an expert has is then known to the device alone, which sorts them. So no pass waits for the host, and the
kernels of a pass are the same in every call: they are recorded once for all layers of a kind, and in one piece if no
expert streams in between. A call's tensors are copied to memory that the recordings read.

Every chunk is computed in as many pieces as all rows of the call would need, since nobody but the device knows how many
rows it has. Kernels of pieces without rows end at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ktft.device import device_of
from ktft.lanes.gpu.call_memory import CallMemory, CutRows, call_bytes
from ktft.lanes.gpu.chunks import Chunk, DecodedChunk, Kernels, kernels_of, run_together
from ktft.lanes.gpu.graphs import Recorded
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.ops.chunk import chunk_backward, chunk_forward, is_grouped
from ktft.lanes.ops.dropout import room_for_streams, write_streams
from ktft.lanes.ops.interface import KeptGates, by_triton
from ktft.lanes.routes import Piece, piece_rows
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer

SIZES, SIZES_BYTES = 8, 1 << 30
"""The most sizes of calls that are steady, and of bytes for them: each size needs memory of its own."""
EMPTY_PIECES = 32
"""The most pieces without rows of a steady pass. On an H100 each takes some 40 µs forward and backward, and the host's
wait for the routing some 4 ms.
"""


def empty_pieces(rows: int, chunks: int, hidden_size: int, intermediate_size: int) -> int:
    """The most pieces without rows of a steady pass."""
    pieces = -(-rows // piece_rows(hidden_size, intermediate_size))
    return chunks * pieces - max(chunks, pieces)


class SteadyLane:
    """Runs steady passes on a lane's device, for all layers of a model."""

    def __init__(self, lane: GpuLane) -> None:
        self._lane = lane
        self._by_device = by_triton(lane.device)
        self._recorded = Recorded(lane.device, on=self._by_device)
        self._memory: dict[tuple[object, ...], CallMemory] = {}
        self._uses: Counter[tuple[ExpertLayer, tuple[object, ...]]] = Counter()
        self._sizes: dict[tuple[object, ...], int] = {}  # and the bytes of each
        self._lora_grads: dict[tuple[object, ...], _GradBuffer] = {}
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
        self,
        layer: ExpertLayer,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
        keep: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The layer's output `[T, H]`, in the dtype of `hidden`, what makes a `PassReport`, and gate and up of all
        routes if they are kept. Returns when the work is queued.

        Args:
            hidden: `[T, H]` on the device; top_k_index: `[T, k]`; top_k_weights: `[T, k]` fp32.
            lora: as in `GpuLane.forward`.
            keep: keep gate and up, bf16, for `backward`, if there is memory.

        Raises:
            torch.OutOfMemoryError, ValueError: as in `GpuLane.forward`.
        """
        gates = _room_for_gates(layer, top_k_index, hidden.device) if keep else None
        with self._lane.using(layer, "forward"), torch.inference_mode(False), torch.no_grad():
            taken = self._taken(layer, hidden, top_k_index, top_k_weights, lora, gates)
            memory = taken.memory

            def products(number: int, decoded: DecodedChunk) -> None:
                given = memory.hidden, memory.weights, layer.swiglu, memory.total
                rows = self._rows(taken, number)
                chunk_forward(decoded.weights, decoded.adapters, rows, *given, kept=taken.kept)

            for _ in self._queue("forward", layer, taken, products):
                pass
            return memory.total.to(hidden.dtype, copy=True), memory.told.clone(), gates

    def backward(
        self,
        layer: ExpertLayer,
        hidden: Tensor,
        grad_output: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
        lora_grads: Sequence[Tensor],
        gates: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of hidden states, in their dtype, and of routing weights, fp32; and what makes a `PassReport`.
        LoRA's gradients are complete, for all experts, when `GpuLane.finish` returns.

        Args:
            layer, hidden, top_k_index, top_k_weights, lora: as in `forward`.
            grad_output: `[T, H]` on the device.
            lora_grads: as in `GpuLane.backward`.
            gates: gate and up, if `forward` kept them.

        Raises:
            torch.OutOfMemoryError, ValueError: as in `GpuLane.backward`.
        """
        self._lane.returning.check(layer, lora, lora_grads)
        with self._lane.using(layer, "backward"), torch.inference_mode(False), torch.no_grad():
            taken = self._taken(layer, hidden, top_k_index, top_k_weights, lora, gates)
            memory, transfer = taken.memory, self._lane.transfer
            memory.grad_output.copy_(grad_output)

            def products(number: int, decoded: DecodedChunk) -> None:
                rows, buffer = self._rows(taken, number), self._buffer(number, decoded.adapters).memory
                if not rows:
                    buffer.zero_()
                    return
                chunk_backward(
                    decoded.weights, decoded.adapters, rows, memory.hidden, memory.weights, layer.swiglu,
                    memory.grad_output, memory.total, memory.grad_weights, lora_grads=buffer, kept=taken.kept,
                )  # fmt: skip

            def wait(number: int, decoded: DecodedChunk) -> None:
                self._buffer(number, decoded.adapters).returned.wait(transfer.compute())

            for number, decoded in self._queue("backward", layer, taken, products, wait):
                buffer = self._buffer(number, decoded.adapters)
                self._lane.returning.give_back(decoded.experts, buffer.grads, lora_grads)
                buffer.returned.record(transfer.out)
            of_hidden = memory.total.to(hidden.dtype, copy=True)
            return of_hidden, memory.grad_weights.clone(), memory.told.clone()

    def _taken(
        self,
        layer: ExpertLayer,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None,
        gates: Tensor | None,
    ) -> _Taken:
        """What a pass gets, in memory where recordings look for it."""
        size = hidden.shape, hidden.dtype, top_k_index.shape[1], layer.num_experts
        if size not in self._memory:
            self._memory[size] = CallMemory(hidden.detach(), top_k_index.shape[1], layer.num_experts)
        memory, chunks = self._memory[size], self._lane.all_chunks(layer, lora)
        memory.hidden.copy_(hidden)
        memory.index.copy_(top_k_index)
        memory.weights.copy_(top_k_weights)
        sizes = tuple(len(chunk.experts) for chunk in chunks)
        cut = CutRows(sizes, piece_rows(layer.hidden_size, layer.intermediate_size))
        kept = None
        if gates is not None:
            memory.kept.fill_(gates.data_ptr())
            kept = KeptGates(gates, memory.kept)
        return _Taken(memory, chunks, self._with_streams(lora), size, cut, kept)

    def _queue(
        self,
        work: str,
        layer: ExpertLayer,
        taken: _Taken,
        products: Callable[[int, DecodedChunk], None],
        before: Callable[[int, DecodedChunk], None] = lambda *_: None,
    ) -> Iterator[tuple[int, DecodedChunk]]:
        """Queue a pass in as few pieces as may be. Yields each chunk, with its number, after its products.

        `products` runs those of a chunk, and may be recorded; `before` is called when they are about to be queued.
        """
        key, chunks = (taken.size, taken.cut, taken.kept is not None), taken.chunks
        kernels = [Kernels(("begin", *key), partial(taken.memory.begin, taken.cut))]
        if not self._lane.go_at_once(chunks):
            run_together(self._recorded, [kernels.pop()])
        queued = 0
        for group in self._groups(layer, taken):
            numbered = list(enumerate(group, queued))
            for number, decoded in numbered:
                before(number, decoded)
                own, left, decoded.left = decoded.adapters, decoded.left, []
                numbers = (own.dropout, *(pair.scaling for pair in own.pairs.values())) if own is not None else ()
                run = partial(products, number, decoded)
                kernels += [*left, kernels_of(chunks[number], (), run, work, layer.swiglu, number, *numbers, *key)]
            run_together(self._recorded, kernels)
            kernels, queued = [], queued + len(group)
            yield from numbered

    def _groups(self, layer: ExpertLayer, taken: _Taken) -> Iterator[list[DecodedChunk]]:
        """Chunks that are queued together. One that streams in must be decoded before the next can take its place."""
        rows_each = taken.memory.index.numel() / layer.num_experts
        if self._lane.go_at_once(taken.chunks):
            with self._lane.at_once(layer, taken.chunks, taken.lora, rows_each) as every:
                yield every
        else:
            for each in self._lane.decoded(layer, taken.chunks, taken.lora, True, rows_each):
                yield [each]

    def _with_streams(self, lora: ExpertLora | None) -> ExpertLora | None:
        """The adapters with this call's dropout where recordings look for it."""
        if lora is None or lora.dropout <= 0:
            return lora
        return replace(lora, streams=write_streams(lora, self._streams))

    def _rows(self, taken: _Taken, number: int) -> list[Piece]:
        """The rows of a chunk."""
        pieces = taken.memory.pieces(taken.cut, number)
        if self._by_device:
            return pieces
        # torch's own operations have no bound for rows: they get as many as there are
        counts = [int(piece.ends[-1]) for piece in pieces]
        return [replace(each, row_route=each.row_route[:n]) for each, n in zip(pieces, counts, strict=True) if n]

    def _buffer(self, number: int, own: ExpertLora | None) -> _GradBuffer:
        """That of a chunk's LoRA."""
        shapes = [each.shape for each in own.parameters()] if own is not None else []
        if (key := (number, *shapes)) not in self._lora_grads:
            sizes = [shape.numel() for shape in shapes]
            made = torch.empty(sum(sizes), device=self._lane.device)
            parts = zip(made.split(sizes), shapes, strict=True) if shapes else ()
            grads = [part.view(shape) for part, shape in parts]
            self._lora_grads[key] = _GradBuffer(made, grads, self._lane.transfer.event())
        return self._lora_grads[key]


def _room_for_gates(layer: ExpertLayer, top_k_index: Tensor, device: torch.device) -> Tensor | None:
    """Memory for gate and up of all routes; None if there is none left."""
    columns = (2 if layer.swiglu.gated else 1) * layer.intermediate_size
    try:
        return torch.empty(top_k_index.numel(), columns, dtype=torch.bfloat16, device=device)
    except torch.OutOfMemoryError:
        return None


class _Taken(NamedTuple):
    """What one pass gets; `size` is that of its call. `kept` is where gate and up are kept, if they are."""

    memory: CallMemory
    chunks: list[Chunk]
    lora: ExpertLora | None
    size: object
    cut: CutRows
    kept: KeptGates | None


class _GradBuffer(NamedTuple):
    """Memory for the gradients of a chunk's LoRA, those of each tensor there, and the event after which they have left
    it.
    """

    memory: Tensor
    grads: list[Tensor]
    returned: Any
