"""One layer's routed experts in several lanes at once: on the CPU, streamed to the GPU, and resident there."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ktft import spans
from ktft.lanes.gpu.crossing import Arriving
from ktft.lanes.kept import Inputs, KeptOutputs, OwnRows, state_of
from ktft.lanes.lanes import DeviceLanes, Lanes
from ktft.lanes.passes import Pass
from ktft.lanes.record import Record
from ktft.lanes.routes import Routes, only, rows_of
from ktft.lanes.steady_call import Steady, SteadyCall, not_finite
from ktft.lanes.terms import Work
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer, Gradients

_ALIGNED = 64
"""How many fp32 elements 256 bytes hold."""


@dataclass
class LanedExperts:
    """One layer's experts, and the lanes that they run in.

    Attributes:
        number: of the decoder layer.
        activation: what the CPU lane keeps, `retain` or `recompute`. The GPU lanes compute gate and up again, but see
            `keeps_gates`.
        kept: outputs for checkpointing's second forward.
        seen: called with every forward pass and its rows by expert, once its lanes have it.
        keeps_gates: whether steady passes keep gate and up on the GPU for their backward.
        gate_bytes: the bytes of a token's gate and up; 0 before any were kept.
    """

    lanes: Lanes
    layer: ExpertLayer
    number: int
    activation: str
    kept: KeptOutputs = field(default_factory=KeptOutputs)
    seen: Callable[[Pass, Sequence[int]], None] | None = None
    keeps_gates: bool = False
    gate_bytes: int = 0

    def __call__(
        self,
        lanes: DeviceLanes,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        lora: ExpertLora | None = None,
        record: Record | None = None,
        training: bool = False,
        meanwhile: Callable[[Tensor], None] | None = None,
        own: OwnRows | None = None,
        link: Hashable = None,
    ) -> Tensor:
        """As `ktft.model.autograd.routed_experts`, which has the arguments that are not listed here.

        Args:
            lanes: what `self.lanes.on` gives for the device of the hidden states.
            training: keep the output of a forward without gradients, because checkpointing will ask for it again.
            meanwhile: gives the GPU independent work on the hidden states, once the CPU is at work.
            own: what is kept in place of the output, if ranks share the experts. If it was found, the values of the
                output mean nothing.
            link: equal in the two calls that checkpointing makes of one layer with the same tensors, and that of a call
                which is not made again; None if nobody knows.

        Raises:
            ValueError: as `routed_experts`.
            torch.OutOfMemoryError: the GPU lane has no room.
        """
        inputs = [hidden_states, top_k_weights, *(lora.parameters() if lora is not None else ())]
        gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        again = training and not gradients and not torch.is_inference_mode_enabled()
        link = link if lanes.links else None
        if link is not None and (gradients or again):
            steady = self._steady(lanes, hidden_states, top_k_index, top_k_weights, lora, record, again, link)
            if steady is not None:
                return steady
        call = _Call(self, lanes, lora, record, gradients, again, own, link)
        call.begin(hidden_states.detach(), top_k_index, top_k_weights.detach())
        if meanwhile is not None:
            with _settled(call.cpu):
                meanwhile(hidden_states)
        parameters = inputs[2:]
        call.owes = link is not None and lanes.may_owe(parameters)
        if gradients and not call.owes and any(tensor.requires_grad for tensor in parameters):
            parameters = _Arrival.apply(call, *parameters)
            parameters[0].grad_fn._set_sequence_nr(0)
        out = _Laned.apply(call, hidden_states, top_k_index, top_k_weights, *parameters)
        assert isinstance(out, Tensor)
        if record is not None and torch.is_grad_enabled() and not out.requires_grad:
            record.count(call.inputs.top_k_index)
        return out

    def _steady(
        self,
        lanes: DeviceLanes,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        lora: ExpertLora | None,
        record: Record | None,
        again: bool,
        link: Hashable,
    ) -> Tensor | None:
        """The output of a call whose passes are steady, forward and backward; None if they are not."""
        layer, number = self.layer, self.number

        def forward() -> tuple[Tensor, Tensor, Tensor | None]:
            given = hidden.detach(), index, weights.detach().float()
            with lanes.steady_pass(layer, number, index.numel(), Work.FORWARD) as lane:
                out, told, gates = lane.forward(layer, *given, lora, self.keeps_gates)
            if gates is not None:
                self.gate_bytes = gates.nbytes // len(hidden)
            return out, told, gates

        kept = self.kept.linked.get(link)
        if again or kept is None:
            if not lanes.is_steady(layer, hidden, index.shape[1], lora):
                return None
            out, told, gates = forward()
            if again:
                self.kept.linked[link] = SteadyKept(out, out._version, told, gates, state_of(lora))
                return out
        elif isinstance(kept, SteadyKept):
            del self.kept.linked[link]
            out, told, gates = kept.out, kept.told, kept.gates
            if out._version != kept.version or kept.state != state_of(lora):
                out, told, gates = forward()
        else:
            return None
        call = SteadyCall(lanes, layer, number, lora, record, told, out.detach(), partial(_room, lanes), gates)
        parameters = lora.parameters() if lora is not None else []
        call.owes = lanes.may_owe(parameters)
        if not call.owes and any(tensor.requires_grad for tensor in parameters):
            parameters = _Arrival.apply(call, *parameters)
            parameters[0].grad_fn._set_sequence_nr(0)
        found: Tensor = Steady.apply(call, hidden, index, weights, *parameters)
        return found

    def __post_init__(self) -> None:
        self.lanes.kept.add(self.kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> LanedExperts:
        return LanedExperts(self.lanes, self.layer, self.number, self.activation)


@dataclass(eq=False)
class _Call:
    """One call of a layer, from its routing to its gradients.

    After `finish` it must not refer to the output: autograd makes the output refer to this, and only gc would free such
    a cycle.
    """

    owner: LanedExperts
    lanes: DeviceLanes
    lora: ExpertLora | None
    record: Record | None
    gradients: bool  # a backward may follow
    keep: bool  # checkpointing will ask for the output again
    own: OwnRows | None
    link: Hashable
    inputs: Inputs = field(init=False)
    device_weights: Tensor = field(init=False)  # `[T, k]` fp32
    routes: Routes = field(init=False)
    run: Pass | None = None  # after `finish` only if its CPU lane saved what backward needs
    cpu: Future[Any] | None = None  # work of the CPU lane in forward
    kept: Tensor | None = None  # the output, if checkpointing's first forward left it; there is no pass then
    saved: Any = None  # what the CPU lane saved for backward
    owes: bool = False  # LoRA's gradients do not go through autograd
    zeroed: Future[None] | None = None  # zeroes LoRA's gradients of experts without rows, in the CPU lane's thread

    def begin(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        """Send the host what it needs, decide where the experts run, and set the CPU to work."""
        owner, lanes = self.owner, self.lanes
        self.device_weights = weights.float().contiguous()
        linked = owner.kept.take(self.link, self.lora) if self.gradients and self.link is not None else None
        if linked is not None:
            lanes.compare(linked.routes.top_k_index, index)
            self.inputs, self.routes, self.kept = linked.inputs, linked.routes, linked.out.detach()
            return
        # If a token's sum is finite, all its values are: one kernel proves it
        sums = hidden.sum(1, dtype=torch.float32)
        arriving = lanes.crossing.to_host(index.to(torch.int64), self.device_weights, sums)
        may_be_kept = self.gradients and len(owner.kept) > 0
        sent = None
        if lanes.needs_cpu(owner.layer) and not may_be_kept:
            sent = lanes.crossing.rows_to_host(owner.number, hidden)
        with spans.span("wait", owner.number):
            self.inputs = Inputs(*arriving.wait())
        if not np.isfinite(self.inputs.sums.numpy()).all() and not torch.isfinite(hidden).all():
            token = int((~torch.isfinite(hidden).all(1)).nonzero()[0])
            raise ValueError(not_finite(owner.layer.name, token, len(hidden)))
        kept = owner.kept.pop(self.inputs, self.lora) if may_be_kept else None
        if kept is not None:
            self.kept, self.routes = kept
            if self.own is not None:
                self.own.found, self.kept = self.kept, self.kept.new_zeros(1).expand(hidden.shape)
            return
        if self.link is not None:  # a recorded layer overwrites it
            index = index.clone()
        self.routes = Routes(index, rows_of(owner.layer, self.inputs.top_k_index))
        self.run = self._placed(Work.BOTH if self.gradients and owner.activation == "retain" else Work.FORWARD)
        if self.run.placement.cpu:
            sent = sent or lanes.crossing.rows_to_host(owner.number, hidden)
            self.cpu = lanes.cpu.submit(self._cpu_forward, sent, self.run)

    def _placed(self, work: Work) -> Pass:
        layer, top_k = self.owner.layer, self.inputs.top_k_index.shape[1]
        return self.lanes.begin(layer, self.owner.number, self.routes.counts, top_k, self.lora, work)

    def _cpu_forward(self, arriving: Arriving, run: Pass) -> tuple[Tensor, Any]:
        """The CPU lane's part of the output, and what is saved for its backward; None if nothing is."""
        layer, activation = self.owner.layer, self.owner.activation if self.gradients else "none"
        here = only(self.inputs.top_k_index, run.placement.cpu, layer.num_experts)
        (hidden,) = arriving.wait()
        out = self.lanes.crossing.pinned(hidden.shape, hidden.dtype)
        with run.cpu_span(len(layer.projections)):
            _, saved = layer.forward(hidden, here, self.inputs.top_k_weights, self.lora, activation, out=out)
        run.cpu_seconds = time.perf_counter() - run.began
        return out, saved if activation == "retain" else None

    def _result(self, work: Future[Any]) -> Any:
        """What the CPU lane computed."""
        with spans.span("wait", self.owner.number):
            return work.result()

    def finish(self, hidden: Tensor) -> Tensor:
        """Run the GPU's experts, and add up what the lanes computed."""
        owner, lanes, run, cpu, kept = self.owner, self.lanes, self.run, self.cpu, self.kept
        self.run = self.cpu = self.kept = None
        if run is None:
            assert kept is not None
            return kept
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        with _settled(cpu):
            lanes.forward(run, self.routes, hidden.contiguous(), self.device_weights, total)
        if cpu is not None:
            computed, self.saved = self._result(cpu)
            total += lanes.crossing.rows_to_device(owner.number, computed)[0]
        if owner.seen is not None:
            owner.seen(run, run.counts)
        if self.saved is not None:
            self.run = run
        out = total.to(hidden.dtype)
        if self.keep:
            keep = partial(owner.kept.keep, self.inputs, self.routes, self.lora)
            if self.own is None:
                keep(out, self.link)
            else:
                self.own.keep = keep
        return out

    def backward(
        self, grad_output: Tensor, hidden: Tensor, index: Tensor, weights: Tensor, waited_for: bool
    ) -> Gradients:
        """All gradients, each on the device of its tensor.

        Those of LoRA may be in flight. `waited_for` promises that `wait` is called before they are read.
        """
        lanes, layer, number, counts = self.lanes, self.owner.layer, self.owner.number, self.routes.counts
        run = self._placed(Work.BACKWARD) if self.run is None else lanes.again(self.run)
        grad_output = grad_output.to(hidden.dtype).contiguous()
        parameters = self.lora.parameters() if self.lora is not None else []
        lora_grads = _room(self.lanes, [tensor.shape for tensor in parameters])
        cpu: Future[Gradients] | None = None
        if run.placement.cpu:
            sent = lanes.crossing.rows_to_host(number, grad_output, hidden)
            cpu = lanes.cpu.submit(self._cpu_backward, sent, run, lora_grads)
        elif lora_grads and 0 in counts:
            self.zeroed = lanes.cpu.submit(_zero_idle, lora_grads, counts)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weights = torch.zeros(weights.shape, dtype=torch.float32, device=weights.device)
        with _settled(cpu, self.zeroed):
            given = self.routes, hidden.contiguous(), grad_output, self.device_weights
            lanes.backward(run, *given, grad_hidden, grad_weights, lora_grads)
        if cpu is not None:
            found = self._result(cpu)
            parts = lanes.crossing.rows_to_device(number, found.hidden_states, found.top_k_weights)
            grad_hidden += parts[0]
            grad_weights += parts[1]
        # Autograd itself reads gradients that it must cast, or search for NaN
        cast = any(p.dtype != torch.float32 for p in parameters)
        if not self.owes and (not waited_for or torch.is_anomaly_enabled() or cast):
            self.wait()
        lanes.observe(layer, counts)
        if self.record is not None:
            self.record.add(counts, len(self.inputs.top_k_index))
            if self.record.watching:
                self.record.count_reached(index, weights, grad_output)
        pairs = zip(lora_grads, parameters, strict=True)
        lora = lora_grads if self.owes else [grad.to(tensor.dtype) for grad, tensor in pairs]
        return Gradients(grad_hidden.to(hidden.dtype), grad_weights.to(weights.dtype), lora)

    def _cpu_backward(self, arriving: Arriving, run: Pass, lora_grads: list[Tensor]) -> Gradients:
        layer, again = self.owner.layer, self.saved is None
        here = only(self.inputs.top_k_index, run.placement.cpu, layer.num_experts)
        elsewhere = torch.zeros(layer.num_experts, dtype=torch.bool)
        elsewhere[run.on_gpu] = True
        saved = layer.prepare(here) if again else self.saved
        grad_output, hidden = arriving.wait()
        each = len(layer.projections)
        with run.cpu_span(2 * each - 1 if again else each):
            given = saved, grad_output, hidden, here, self.inputs.top_k_weights, self.lora
            grad_hidden = self.lanes.crossing.pinned(hidden.shape, hidden.dtype)
            found = layer.backward(*given, elsewhere=elsewhere, lora_grads=lora_grads, grad_hidden=grad_hidden)
        run.cpu_seconds = time.perf_counter() - run.began
        return found

    def arrival(self) -> Callable[[], None]:
        """A function that waits until LoRA's gradients are in host memory."""
        zeroed, arrived = self.zeroed, self.lanes.gpu.arrival()
        self.zeroed = None

        def wait() -> None:
            if zeroed is not None:
                zeroed.result()
            arrived()

        return wait

    def wait(self) -> None:
        """Wait until LoRA's gradients are in host memory."""
        with spans.span("wait", self.owner.number):
            if self.zeroed is not None:
                self.zeroed.result()
                self.zeroed = None
            self.lanes.gpu.finish()


@dataclass(frozen=True, eq=False)
class SteadyKept:
    """The output of a steady forward that will be asked for again, its version, what makes its `PassReport`, gate and
    up if they are kept, and the state of adapters.
    """

    out: Tensor
    version: int
    told: Tensor
    gates: Tensor | None
    state: tuple[object, ...]


def _room(lanes: DeviceLanes, shapes: list[torch.Size]) -> list[Tensor]:
    """Make fp32 tensors in one piece of pinned memory, each aligned like a separate tensor."""
    if not shapes:
        return []
    size, places = _places(tuple(shapes))
    memory = lanes.crossing.pinned((size,), torch.float32)
    return [memory.as_strided(*place) for place in places]


@functools.lru_cache
def _places(shapes: tuple[torch.Size, ...]) -> tuple[int, list[tuple[torch.Size, tuple[int, ...], int]]]:
    """The elements that contiguous tensors of these shapes take in one piece; and the shape of each, its strides and
    where it begins.
    """
    sizes = [-(-shape.numel() // _ALIGNED) * _ALIGNED for shape in shapes]
    strides = [torch.empty(shape, device="meta").stride() for shape in shapes]
    begins = itertools.accumulate(sizes, initial=0)
    return sum(sizes), list(zip(shapes, strides, begins, strict=False))


@contextlib.contextmanager
def _settled(*works: Future[Any] | None) -> Iterator[None]:
    """A block that an error leaves only after these works on the CPU have ended, even if they failed, so that buffers
    and layers may be freed.
    """
    try:
        yield
    except BaseException:
        for work in works:
            if work is not None:
                work.exception()
        raise


class _Laned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *ab: Tensor
    ) -> Tensor:
        # save_for_backward lets autograd notice an in-place change of a tensor that backward still needs
        ctx.save_for_backward(hidden_states, top_k_index, top_k_weights, *ab)
        ctx.call = call
        return call.finish(hidden_states)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, top_k_index, top_k_weights, *_ = ctx.saved_tensors
        waited_for = any(ctx.needs_input_grad[4:])  # then these inputs come from an `_Arrival`
        call: _Call = ctx.call
        grads = call.backward(grad_outputs[0], hidden_states, top_k_index, top_k_weights, waited_for)
        if call.owes:
            assert call.lora is not None
            call.lanes.owe(call.owner.layer, call.arrival(), call.lora.parameters(), grads.lora)
            return None, grads.hidden_states, None, grads.top_k_weights, *(None for _ in grads.lora)
        return None, grads.hidden_states, None, grads.top_k_weights, *grads.lora


class _Arrival(torch.autograd.Function):
    """Returns LoRA's tensors unchanged. Its backward waits for their gradients.

    It is last in autograd's order, so that the GPU has attention's backward before the host waits.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call | SteadyCall, *ab: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        return ab

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.call.wait()
        return None, *grads


def _zero_idle(lora_grads: list[Tensor], counts: Sequence[int]) -> None:
    """Zero the gradients of experts without rows. The native backward does this if the CPU has experts of its own."""
    idle = [expert for expert, rows in enumerate(counts) if rows == 0]
    for grad in lora_grads:
        size = grad[0].nbytes
        for expert in idle:  # ctypes gives up Python's lock meanwhile
            ctypes.memset(grad.data_ptr() + expert * size, 0, size)
