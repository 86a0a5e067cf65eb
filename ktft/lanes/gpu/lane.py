"""The GPU lane: packed experts go to the device as they are, in chunks, and are decoded and multiplied there.

While one chunk is multiplied the next one is on its way: buffers of packed bytes take turns, one of decoded weights is
used by all. Events order the streams; the host waits for none of it.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ktft.config import LANE_BYTES, PROJECTIONS
from ktft.device import device_of
from ktft.lanes.decide.placer import Coming
from ktft.lanes.gpu.buffers import Buffers, Plan
from ktft.lanes.gpu.graphs import Recorded
from ktft.lanes.gpu.rings import Place
from ktft.lanes.gpu.transfer import transfer
from ktft.lanes.ops.chunk import chunk_backward, chunk_forward
from ktft.lanes.ops.decode import ChunkWeights, decode, place
from ktft.lanes.ops.interface import by_triton
from ktft.lanes.routes import ChunkRows, Routes, lay_out, piece_rows
from ktft.lora import ExpertLora, LoraPair
from ktft.native import ExpertLayer
from ktft.native.cuda import Rows
from ktft.system import readable

if TYPE_CHECKING:
    from ktft.lanes.gpu.residents import Residents

CHUNK_BYTES = 320 << 20
"""Packed bytes of a chunk, at most. The larger, the less a layer costs the host that launches its chunks' kernels."""


@dataclass(frozen=True)
class _Part:
    """Experts of one chunk; `slots` are their places among the residents, None where they are streamed."""

    experts: list[int]
    slots: list[int] | None = None


@dataclass(frozen=True)
class _Begun:
    """A chunk on its way."""

    part: _Part
    packed: Place | None
    adapters: Place | None = None


@dataclass(frozen=True)
class _Chunk:
    """A chunk that can be multiplied."""

    experts: list[int]
    rows: ChunkRows
    weights: ChunkWeights
    lora: ExpertLora | None


class GpuLane:
    """Experts streamed to one device, and those that stay there; shared by all layers of a model.

    Products run on torch's current stream. Any thread may call: the buffers, what was begun ahead and the events belong
    to one call at a time, and a call that comes meanwhile waits until this one's work is queued. Events then order the
    work of both on the device, also where the threads use different streams.

    Args:
        device: `cuda`, `cuda:N`, or `cpu`, where the same is done with plain copies.
        chunk_bytes: packed bytes of a chunk; it holds one expert at least.
        limit: bytes of the lane's buffers, as far as one expert a chunk allows.

    Attributes:
        transfer: the device's copies.
        residents: which experts stay on the device; None where none do.
        used: event: the products of the last call are done with the lane's memory.
        mutex: held by whoever gives the device work through the lane, or moves its residents.

    Raises:
        CudaError: CUDA's driver cannot be opened.
        ValueError: a device of another kind.
    """

    def __init__(self, device: torch.device | str, *, chunk_bytes: int = CHUNK_BYTES, limit: int = LANE_BYTES) -> None:
        device = device_of(torch.device(device)).indexed()
        self.device, self.transfer = device, transfer(device)
        self.residents: Residents | None = None
        self._buffers = Buffers(self.transfer, chunk_bytes, limit)
        self._recorded = Recorded(device, on=by_triton(device))
        self._ahead: deque[tuple[Plan, _Begun]] = deque()
        self._returning: list[Tensor] = []  # that copies out may be writing: nobody else gets their memory
        self.used, self._made, self._arrived, self._returned = (self.transfer.event() for _ in range(4))
        self.mutex = threading.RLock()
        _LANES.add(self)

    @property
    def bytes(self) -> int:
        """Of the lane's buffers on the device, without the residents."""
        return self._buffers.bytes

    def hold(self, residents: Residents | None) -> None:
        """Take these experts from the device from now on."""
        with self.mutex:
            self.residents = residents
            self._buffers.forget()

    def lock(self, layers: Iterable[ExpertLayer], progress: Callable[[str, int], None] | None = None) -> bool:
        """Lock the layers' packed experts where they lie, some GB a second. Else a layer's first call does.

        Args:
            layers: which.
            progress: called with a layer's name and its bytes, when they are done with.

        Returns:
            Whether all are locked. Those that are not go through buffers, which costs speed; the log says why.
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
        """Add these experts' part to the layer's output. Returns when the work is queued.

        Args:
            layer: the packed experts.
            experts: which: residents run first, others in the order of their numbers, so that neighbours travel in one.
            routes: of the whole call, on the device.
            hidden: `[T, H]` fp32, bf16 or fp16; top_k_weights: `[T, k]` fp32; both contiguous, on the device.
            lora: adapters, CPU tensors `[E, ...]`; they must not change before `settle` or `finish`.
            out: fp32 `[T, H]` on the device, added to.

        Raises:
            torch.OutOfMemoryError: the device has no room; the message has the cure.
            ValueError: a LoRA tensor that cannot be copied.
        """
        with self._guard(layer, "forward"):
            for chunk in self._chunks(layer, experts, routes, lora):
                chunk_forward(chunk.weights, chunk.lora, chunk.rows, hidden, top_k_weights, layer.swiglu, out)

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
        """Add these experts' part to the gradients; `finish` says when those of LoRA are there.

        Args:
            layer, experts, routes, hidden, top_k_weights, lora: as `forward` took them.
            grad_output: `[T, H]` fp32, bf16 or fp16, contiguous, on the device.
            grad_hidden, grad_weights: fp32 `[T, H]` and `[T, k]` on the device, added to.
            lora_grads: of a, b of each adapted projection in the order of `PROJECTIONS`: contiguous fp32 CPU tensors
                `[E, ...]`, pinned or alive for long enough to be. The rows of `experts` are written, no others.

        Raises:
            torch.OutOfMemoryError: the device has no room; the message has the cure.
            ValueError: a LoRA tensor that cannot be copied, or gradients that cannot be copied to.
        """
        self._check(layer, lora, lora_grads)
        with self._guard(layer, "backward"):
            self._returning += lora_grads
            for chunk in self._chunks(layer, experts, routes, lora):
                rows = chunk.rows, hidden, top_k_weights, layer.swiglu
                grads = chunk_backward(chunk.weights, chunk.lora, *rows, grad_output, grad_hidden, grad_weights)
                self._return(chunk.experts, grads, lora_grads)

    def finish(self) -> None:
        """Wait until LoRA's gradients are where they belong, and its tensors may change."""
        with self.mutex:
            returning, self._returning = self._returning, []
        self._returned.synchronize()
        self.settle()
        del returning  # alive until here, whichever thread's they are

    def settle(self) -> None:
        """Wait until LoRA's tensors have been copied for all calls so far: they may change then."""
        self._arrived.synchronize()

    def prefetch(self, layer: ExpertLayer, experts: Sequence[int], lora: ExpertLora | None) -> None:
        """Begin to copy packed experts that the layer's next call is likely to need, as far as the buffers go.

        That call begins with these chunks, up to the first one that has an expert whose rows it does not compute. A
        call of another layer drops them all. Of `lora`, the adapters of that call, nothing is copied yet.
        """
        with self._guard(layer, "prefetch"):
            if self._ahead:
                return
            plan, held = self._plan(layer, lora), self._held(layer)
            parts = _cut(plan, sorted(e for e in experts if e not in held))
            for part in itertools.islice(parts, len(plan.packed)):
                self._ahead.append((plan, _Begun(part, self._buffers.packed.fill(plan.packed, part.experts))))

    def forget(self) -> None:
        """Begin the next call with nothing on its way."""
        with self.mutex:
            self._buffers.packed.turn_back(len(self._ahead))
            self._ahead.clear()

    def coming(self, layer: ExpertLayer, lora: ExpertLora | None) -> Coming:
        """Experts of a layer that `prefetch` began to copy for a call with these adapters."""
        with self.mutex:
            if not self._ahead or self._ahead[0][0] is not self._plan(layer, lora):
                return Coming()
            sizes = [len(begun.part.experts) for _, begun in self._ahead]
            there = sum(begun.packed is not None and begun.packed.there() for _, begun in self._ahead)
            # Of the chunk that is being copied, half is there for all that is known
            arrived = sum(sizes[:there]) + sum(sizes[there : there + 1]) / 2
            return Coming([expert for _, begun in self._ahead for expert in begun.part.experts], arrived)

    def _chunks(
        self, layer: ExpertLayer, experts: Sequence[int], routes: Routes, lora: ExpertLora | None
    ) -> Iterator[_Chunk]:
        """The experts in chunks. The caller has queued a chunk's products when it asks for the next one."""
        plan, compute = self._plan(layer, lora), self.transfer.compute()
        ahead, parts = self._parts(layer, plan, experts, routes.counts)
        limit = piece_rows(layer.hidden_size, layer.intermediate_size)
        rows = lay_out(routes, [part.experts for part in parts], limit)
        waiting = self._begin(plan, ahead, parts)
        self.used.wait(compute)
        coming = next(waiting, None)
        for chunk_rows in rows:
            now, coming = coming, next(waiting, None)
            assert now is not None
            weights = self._decode(layer, plan, now, compute)
            yield _Chunk(now.part.experts, chunk_rows, weights, self._place(plan, now, lora, weights, compute))
        self._arrived.record(self.transfer.into)
        self.used.record(compute)

    def _begin(self, plan: Plan, ahead: Sequence[_Begun], parts: Sequence[_Part]) -> Iterator[_Begun]:
        """Begin the parts' copies, each when it is asked for; the first of them were begun ahead."""
        for i, part in enumerate(parts):
            packed = ahead[i].packed if i < len(ahead) else None
            if packed is None and part.slots is None:
                packed = self._buffers.packed.fill(plan.packed, part.experts)
            adapters = self._buffers.adapters.fill(plan.adapters, part.experts) if plan.adapters else None
            yield _Begun(part, packed, adapters)

    def _parts(
        self, layer: ExpertLayer, plan: Plan, experts: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[_Begun], list[_Part]]:
        """What was begun ahead and is of use; and the chunks: those, then residents, then what is left to stream."""
        wanted = set(experts).union(e for e, rows in enumerate(counts) if not rows)
        ahead = [
            begun
            for _, begun in itertools.takewhile(
                lambda entry: entry[0] is plan and wanted.issuperset(entry[1].part.experts), self._ahead
            )
        ]
        self._buffers.packed.turn_back(len(self._ahead) - len(ahead))
        self._ahead.clear()
        left, held = set(experts).difference(*(begun.part.experts for begun in ahead)), self._held(layer)
        stay = sorted((e for e in left if e in held), key=held.__getitem__)
        residents = (_Part(part.experts, [held[e] for e in part.experts]) for part in _cut(plan, stay))
        streamed = _cut(plan, sorted(e for e in left if e not in held))
        return ahead, [*(begun.part for begun in ahead), *residents, *streamed]

    def _plan(self, layer: ExpertLayer, lora: ExpertLora | None) -> Plan:
        return self._buffers.plan(layer, lora, self.residents.sources if self.residents is not None else None)

    def _held(self, layer: ExpertLayer) -> dict[int, int]:
        return self.residents.slots(layer) if self.residents is not None else {}

    def _decode(self, layer: ExpertLayer, plan: Plan, begun: _Begun, compute: object) -> ChunkWeights:
        count = len(begun.part.experts)
        weights = plan.decoded(count)
        if begun.packed is not None:
            packed = begun.packed
            packed.wait(compute)
        else:
            assert self.residents is not None and begun.part.slots is not None
            self.residents.arrived.wait(compute)
            packed = self._buffers.gathered.gather(plan.gathered, begun.part.slots)
        work = partial(decode, layer.format, plan.slices, packed.first(count), weights)
        self._recorded.run(_key(plan, count, packed), work)
        if begun.packed is not None:
            packed.buffer.free.record(compute)
        return weights

    def _place(
        self, plan: Plan, begun: _Begun, lora: ExpertLora | None, weights: ChunkWeights, compute: object
    ) -> ExpertLora | None:
        """Write a chunk's adapters beside its weights; returns them, on the device."""
        if lora is None or begun.adapters is None:
            return None
        begun.adapters.wait(compute)
        count = len(begun.part.experts)
        views = iter(begun.adapters.first(count))
        scalings = {name: lora.pairs[name].scaling for name in PROJECTIONS if name in lora.pairs}
        chunk = replace(lora, pairs={name: LoraPair(next(views), next(views), each) for name, each in scalings.items()})
        key = _key(plan, count, begun.adapters, lora.dropout, *scalings.values())
        self._recorded.run(key, partial(place, chunk, weights))
        begun.adapters.buffer.free.record(compute)
        return chunk

    def _return(self, experts: list[int], grads: Sequence[Tensor], lora_grads: Sequence[Tensor]) -> None:
        """Begin to copy a chunk's LoRA gradients to where they belong."""
        if not grads:
            return
        self._made.record(self.transfer.compute())
        self._made.wait(self.transfer.out)
        pairs = zip(lora_grads, grads, strict=True)
        matrices = [Rows(every.data_ptr(), own.data_ptr(), own.nbytes // len(experts)) for every, own in pairs]
        self.transfer.copy_out(experts, matrices)
        self.transfer.keep(grads[:1], self.transfer.out)  # they share one storage
        self._returned.record(self.transfer.out)

    def _check(self, layer: ExpertLayer, lora: ExpertLora | None, lora_grads: Sequence[Tensor]) -> None:
        wanted = [parameter.shape for parameter in lora.parameters()] if lora is not None else []
        if [grad.shape for grad in lora_grads] != wanted:
            got, expected = ([list(shape) for shape in shapes] for shapes in ([g.shape for g in lora_grads], wanted))
            raise ValueError(f"{layer.name}: LoRA's gradients have the shapes {got}, its tensors {expected}")
        for grad in lora_grads:
            if grad.dtype != torch.float32 or not grad.is_contiguous() or grad.device.type != "cpu":
                raise ValueError(
                    f"{layer.name}: LoRA's gradients must be contiguous fp32 CPU tensors, got {grad.dtype}"
                )
            if not self.transfer.locks.tensor(grad):
                raise ValueError(f"{layer.name}: LoRA's gradients must be pinned: torch.empty(..., pin_memory=True)")

    @contextlib.contextmanager
    def _guard(self, layer: ExpertLayer, work: str) -> Iterator[None]:
        """One call at a time. No copy is under way any more when one fails; memory that is short is an error with its
        cure.
        """
        with self.mutex:
            try:
                yield
            except BaseException as error:
                self._ahead.clear()
                with contextlib.suppress(RuntimeError):  # of a context that is broken: nothing runs there
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
            f"{readable(self.bytes)}, residents {residents}, {free}. Lower "
            "per_device_train_batch_size or gpu_expert_memory, or set placement: cpu in kt_config. torch says: "
            + str(error).partition("\n")[0]
        )


_LANES: weakref.WeakSet[GpuLane] = weakref.WeakSet()


@contextlib.contextmanager
def adapters_at_rest() -> Iterator[None]:
    """A block in which no lane of the process reads LoRA's tensors: an optimizer may write them.

    Copies on their way are waited for, and a call of another thread waits for the block to end.
    """
    with contextlib.ExitStack() as held:
        for lane in list(_LANES):
            held.enter_context(lane.mutex)
            lane.settle()
        yield


def _cut(plan: Plan, experts: Sequence[int]) -> Iterator[_Part]:
    """Chunks of about the same size."""
    count = -(-len(experts) // plan.capacity)
    for i in range(count):
        yield _Part(list(experts[len(experts) * i // count : len(experts) * (i + 1) // count]))


def _key(plan: Plan, experts: int, source: Place, *numbers: float) -> Hashable:
    """What a chunk's kernels depend on; None of one that is not full: how many experts such ones have changes often."""
    return (plan.kind, source.addresses, *numbers) if experts == plan.capacity else None
