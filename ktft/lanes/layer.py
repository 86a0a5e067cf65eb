"""One layer's routed experts in several lanes at once: on the CPU, streamed to the GPU, and resident there.

`_Call.begin` sends the routing to the host, decides, and sets the CPU to work. The GPU can do other work then, until
`_Begun.finish` gives it its experts and adds up what the lanes computed. `_Ran` holds what backward needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ktft import spans
from ktft.config import PROJECTIONS
from ktft.lanes.gpu.crossing import Arriving
from ktft.lanes.kept import Inputs, KeptOutputs
from ktft.lanes.lanes import DeviceLanes, Lanes
from ktft.lanes.passes import Pass
from ktft.lanes.record import Record
from ktft.lanes.routes import Routes, only, rows_of
from ktft.lanes.terms import Work
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer, Gradients

_ALIGNED = 64
"""How many fp32 elements 256 bytes hold."""


@dataclass
class LanedExperts:
    """One layer's experts, and the lanes that they run in.

    Attributes:
        lanes: of the model.
        layer: the packed experts.
        number: of the decoder layer.
        activation: what the CPU lane keeps, `retain` or `recompute`. The GPU lanes always compute gate and up again.
        kept: outputs for checkpointing's second forward.
        seen: called with every forward pass and its rows by expert, once its lanes have it.
    """

    lanes: Lanes
    layer: ExpertLayer
    number: int
    activation: str
    kept: KeptOutputs = field(default_factory=KeptOutputs)
    seen: Callable[[Pass, Sequence[int]], None] | None = None

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
    ) -> Tensor:
        """As `ktft.model.autograd.routed_experts`.

        Args:
            lanes: what `self.lanes.on` gives for the device of the hidden states.
            hidden_states, top_k_index, top_k_weights, lora, record: as in `routed_experts`.
            training: keep the output of a forward without gradients, because checkpointing will ask for it again.
            meanwhile: gives the GPU independent work on the hidden states, once the CPU is at work.

        Raises:
            ValueError: as `routed_experts`.
            torch.OutOfMemoryError: the GPU lane has no room.
        """
        inputs = [hidden_states, top_k_weights, *(lora.parameters() if lora is not None else ())]
        gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        again = training and not gradients and not torch.is_inference_mode_enabled()
        call = _Call(self, lanes, lora, record, gradients, keep=again)
        begun = call.begin(hidden_states.detach(), top_k_index, top_k_weights.detach())
        if meanwhile is not None:
            with begun.settled():
                meanwhile(hidden_states)
        parameters, returning = inputs[2:], _Returning(lanes, self.number)
        if gradients and any(tensor.requires_grad for tensor in parameters):
            parameters = _Arrival.apply(returning, *parameters)
            parameters[0].grad_fn._set_sequence_nr(0)
        out = _Laned.apply(begun, returning, hidden_states, top_k_index, top_k_weights, *parameters)
        assert isinstance(out, Tensor)
        if record is not None and torch.is_grad_enabled() and not out.requires_grad:
            record.count(begun.routing.index)
        return out

    def __post_init__(self) -> None:
        self.lanes.kept.add(self.kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> LanedExperts:
        return LanedExperts(self.lanes, self.layer, self.number, self.activation)


@dataclass(frozen=True)
class _Routing:
    """The routing of a call.

    Attributes:
        index, weights: `[T, k]` int64 and fp32, in host memory.
        sums: fp32 `[T]`, in host memory: each token's sum over its hidden states.
        device_weights: `[T, k]` fp32 on the device.
    """

    index: Tensor
    weights: Tensor
    sums: Tensor
    device_weights: Tensor

    @property
    def inputs(self) -> Inputs:
        """What a kept output is found by; see `KeptOutputs`."""
        return self.index, self.weights, self.sums


@dataclass(frozen=True)
class _Call:
    """One call of a layer. `gradients`: a backward may follow. `keep`: checkpointing will ask for its output again."""

    owner: LanedExperts
    lanes: DeviceLanes
    lora: ExpertLora | None
    record: Record | None
    gradients: bool
    keep: bool

    def begin(self, hidden: Tensor, index: Tensor, weights: Tensor) -> _Begun | _Recalled:
        """Send the host what it needs, decide where the experts run, and set the CPU to work."""
        owner, lanes = self.owner, self.lanes
        device_weights = weights.float().contiguous()
        # If a token's sum is finite, all its values are: one kernel proves it
        arriving = lanes.to_host(index.to(torch.int64), device_weights, hidden.sum(1, dtype=torch.float32))
        may_be_kept = self.gradients and len(owner.kept) > 0
        sent = self.rows_to_host(hidden) if lanes.needs_cpu(owner.layer) and not may_be_kept else None
        with spans.span("wait", owner.number):
            host_index, host_weights, sums = arriving.wait()
        routing = _Routing(host_index, host_weights, sums, device_weights)
        if not np.isfinite(sums.numpy()).all() and not torch.isfinite(hidden).all():
            raise ValueError(_not_finite(owner.layer.name, hidden))
        kept = owner.kept.pop(routing.inputs, self.lora) if may_be_kept else None
        if kept is not None:
            return _Recalled(self, routing, *kept)
        counts = rows_of(owner.layer, routing.index)
        work = Work.BOTH if self.gradients and owner.activation == "retain" else Work.FORWARD
        run = lanes.begin(owner.layer, owner.number, counts, index.shape[1], self.lora, work)
        cpu = None
        if run.placement.cpu:
            cpu = lanes.submit(self._cpu_forward, sent or self.rows_to_host(hidden), routing, run)
        return _Begun(self, routing, Routes(index, counts), run, cpu)

    def _cpu_forward(self, arriving: Arriving, routing: _Routing, run: Pass) -> tuple[Tensor, Any]:
        """The CPU lane's part of the output, and what is saved for its backward; None if nothing is."""
        layer, activation = self.owner.layer, self.owner.activation if self.gradients else "none"
        here = only(routing.index, run.placement.cpu, layer.num_experts)
        (hidden,) = arriving.wait()
        out = self.lanes.pinned(hidden.shape, hidden.dtype)
        with run.cpu_span(len(PROJECTIONS)):
            _, saved = layer.forward(hidden, here, routing.weights, self.lora, activation, out=out)
        run.cpu_seconds = time.perf_counter() - run.began
        return out, saved if activation == "retain" else None

    def result(self, future: Future[Any]) -> Any:
        """What the CPU lane computed."""
        with spans.span("wait", self.owner.number):
            return future.result()

    def rows_to_host(self, *tensors: Tensor) -> Arriving:
        """Begin to copy hidden states or gradients to the CPU lane."""
        return self.lanes.rows_to_host(self.owner.number, *tensors)

    def rows_to_device(self, *tensors: Tensor) -> list[Tensor]:
        """Copy what the CPU lane computed to the device."""
        return self.lanes.rows_to_device(self.owner.number, *tensors)


@dataclass(frozen=True)
class _Begun:
    """A forward whose placement is decided, and whose CPU lane is at work."""

    call: _Call
    routing: _Routing
    routes: Routes
    run: Pass
    cpu: Future[Any] | None

    def settled(self) -> _Settled:
        """A block that an error leaves only after the CPU is done, so that buffers and layers may be freed."""
        return _Settled(self.cpu)

    def finish(self, hidden: Tensor) -> tuple[Tensor, _Ran]:
        """Run the GPU's experts. Returns the output, and what backward needs."""
        call, owner, saved = self.call, self.call.owner, None
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        with self.settled():
            call.lanes.forward(self.run, self.routes, hidden.contiguous(), self.routing.device_weights, total)
        if self.cpu is not None:
            computed, saved = call.result(self.cpu)
            total += call.rows_to_device(computed)[0]
        if owner.seen is not None:
            owner.seen(self.run, self.run.counts)
        out = total.to(hidden.dtype)
        if call.keep:
            owner.kept.keep(self.routing.inputs, self.routes, call.lora, out)
        return out, _Ran(call, self.routing, self.routes, self.run if saved is not None else None, saved)


@dataclass(frozen=True)
class _Recalled:
    """A forward whose output was kept from checkpointing's first forward."""

    call: _Call
    routing: _Routing
    out: Tensor
    routes: Routes

    def settled(self) -> _Settled:
        """As `_Begun.settled`; the CPU has no work."""
        return _Settled()

    def finish(self, hidden: Tensor) -> tuple[Tensor, _Ran]:
        """As `_Begun.finish`."""
        return self.out, _Ran(self.call, self.routing, self.routes)


@dataclass(frozen=True)
class _Ran:
    """A forward that ran.

    It must not refer to the output: autograd makes the output refer to this, and only gc would free such a cycle.

    Attributes:
        retained: the pass, if its CPU lane saved what backward needs; else None.
        saved: what it saved.
    """

    call: _Call
    routing: _Routing
    routes: Routes
    retained: Pass | None = None
    saved: Any = None

    def backward(
        self,
        grad_output: Tensor,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        returning: _Returning,
        waited_for: bool,
    ) -> Gradients:
        """All gradients, each on the device of its tensor.

        Those of LoRA may be in flight. `waited_for` promises that `returning.wait` is called before they are read.
        """
        call, lanes, counts = self.call, self.call.lanes, self.routes.counts
        layer, number = call.owner.layer, call.owner.number
        if self.retained is not None:
            run = lanes.again(self.retained)
        else:
            run = lanes.begin(layer, number, counts, index.shape[1], call.lora, Work.BACKWARD)
        grad_output = grad_output.to(hidden.dtype).contiguous()
        parameters = call.lora.parameters() if call.lora is not None else []
        lora_grads = self._room([tensor.shape for tensor in parameters])
        cpu: Future[Gradients] | None = None
        if run.placement.cpu:
            cpu = lanes.submit(self._cpu_backward, call.rows_to_host(grad_output, hidden), run, lora_grads)
        elif lora_grads and 0 in counts:
            returning.zeroed = lanes.submit(_zero_idle, lora_grads, counts)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weights = torch.zeros(weights.shape, dtype=torch.float32, device=weights.device)
        with _Settled(cpu, returning.zeroed):
            given = self.routes, hidden.contiguous(), grad_output, self.routing.device_weights
            lanes.backward(run, *given, grad_hidden, grad_weights, lora_grads)
        if cpu is not None:
            found = call.result(cpu)
            parts = call.rows_to_device(found.hidden_states, found.top_k_weights)
            grad_hidden += parts[0]
            grad_weights += parts[1]
        # Autograd itself reads gradients that it must cast, or search for NaN
        if not waited_for or torch.is_anomaly_enabled() or any(p.dtype != torch.float32 for p in parameters):
            returning.wait()
        lanes.observe(layer, counts)
        if call.record is not None:
            call.record.count(self.routing.index)
            if call.record.watching:
                call.record.count_reached(index, weights, grad_output)
        lora = [grad.to(tensor.dtype) for grad, tensor in zip(lora_grads, parameters, strict=True)]
        return Gradients(grad_hidden.to(hidden.dtype), grad_weights.to(weights.dtype), lora)

    def _room(self, shapes: list[torch.Size]) -> list[Tensor]:
        """Make fp32 tensors in one piece of pinned memory, each aligned like a separate tensor."""
        if not shapes:
            return []
        sizes = [-(-shape.numel() // _ALIGNED) * _ALIGNED for shape in shapes]
        parts = self.call.lanes.pinned((sum(sizes),), torch.float32).split(sizes)
        return [part[: shape.numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _cpu_backward(self, arriving: Arriving, run: Pass, lora_grads: list[Tensor]) -> Gradients:
        layer, again = self.call.owner.layer, self.saved is None
        here = only(self.routing.index, run.placement.cpu, layer.num_experts)
        elsewhere = torch.zeros(layer.num_experts, dtype=torch.bool)
        elsewhere[run.on_gpu] = True
        saved = layer.prepare(here) if again else self.saved
        grad_output, hidden = arriving.wait()
        with run.cpu_span(len(PROJECTIONS) + (2 if again else 0)):
            found = layer.backward(
                saved,
                grad_output,
                hidden,
                here,
                self.routing.weights,
                self.call.lora,
                elsewhere=elsewhere,
                lora_grads=lora_grads,
                grad_hidden=self.call.lanes.pinned(hidden.shape, hidden.dtype),
            )
        run.cpu_seconds = time.perf_counter() - run.began
        return found


class _Returning:
    """LoRA's gradients of one backward, in flight to host memory.

    Attributes:
        zeroed: work of the CPU lane's thread that zeroes those of experts without rows; None if there is none.
    """

    def __init__(self, lanes: DeviceLanes, number: int) -> None:
        self._lanes, self._number = lanes, number
        self.zeroed: Future[None] | None = None

    def wait(self) -> None:
        """Wait until they have arrived."""
        with spans.span("wait", self._number):
            if self.zeroed is not None:
                self.zeroed.result()
                self.zeroed = None
            self._lanes.finish()


class _Settled:
    """A block that an error leaves only after these works on the CPU have ended, even if they failed."""

    def __init__(self, *works: Future[Any] | None) -> None:
        self._works = works

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for work in self._works if kind is not None else ():
            if work is not None:
                work.exception()


class _Laned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        begun: _Begun | _Recalled,
        returning: _Returning,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *ab: Tensor,
    ) -> Tensor:
        # save_for_backward lets autograd notice an in-place change of a tensor that backward still needs
        ctx.save_for_backward(hidden_states, top_k_index, top_k_weights, *ab)
        out, ctx.ran = begun.finish(hidden_states)
        ctx.returning = returning
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, top_k_index, top_k_weights, *_ = ctx.saved_tensors
        waited_for = any(ctx.needs_input_grad[5:])  # then these inputs come from an `_Arrival`
        given = hidden_states, top_k_index, top_k_weights, ctx.returning, waited_for
        grads = ctx.ran.backward(grad_outputs[0], *given)
        return None, None, grads.hidden_states, None, grads.top_k_weights, *grads.lora


class _Arrival(torch.autograd.Function):
    """Returns LoRA's tensors unchanged. Its backward waits for their gradients.

    It is last in autograd's order, so that the GPU has attention's backward before the host waits.
    """

    @staticmethod
    def forward(ctx: Any, returning: _Returning, *ab: Tensor) -> tuple[Tensor, ...]:
        ctx.returning = returning
        return ab

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.returning.wait()
        return None, *grads


def _zero_idle(lora_grads: list[Tensor], counts: Sequence[int]) -> None:
    """Zero the gradients of experts without rows. The native backward does this if the CPU has experts of its own."""
    idle = [expert for expert, rows in enumerate(counts) if rows == 0]
    for grad in lora_grads:
        grad.numpy()[idle] = 0  # numpy stays in this thread


def _not_finite(name: str, hidden: Tensor) -> str:
    token = int((~torch.isfinite(hidden).all(1)).nonzero()[0])
    return (
        f"{name}: hidden states hold NaN or Inf (token {token} of {len(hidden)}). The layers before this one produced "
        "it: look for a too high learning rate, fp16 overflow (use bf16: true) or damaged weights"
    )
