"""One layer's routed experts in several lanes at once: on the CPU, streamed to the GPU, and resident there."""

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
from ktft.lanes.lanes import Lanes, Pass, only
from ktft.lanes.record import Record
from ktft.lanes.routes import Routes, rows_of
from ktft.lanes.terms import Lane, Where, Work
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer, Gradients

_ALIGNED = 64
"""Elements of fp32: 256 bytes."""


@dataclass
class LanedExperts:
    """One layer's experts, and the lanes that they run in.

    Attributes:
        lanes: of the model.
        layer: the packed experts.
        number: of the decoder layer.
        activation: of the CPU lane, `retain` or `recompute`. The GPU lanes always compute gate and up again.
        kept: outputs for checkpointing's second forward.
        seen: called with every forward pass and its rows by expert, when its lanes have it.
    """

    lanes: Lanes
    layer: ExpertLayer
    number: int
    activation: str
    kept: KeptOutputs = field(default_factory=KeptOutputs)
    seen: Callable[[Pass, Sequence[int]], None] | None = None

    def __call__(
        self,
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
            hidden_states, top_k_index, top_k_weights, lora, record: as there.
            training: keep the output of a forward without gradients: checkpointing will ask for it again.
            meanwhile: gives the GPU independent work on the hidden states, once the CPU has its own.

        Raises:
            ValueError: as there. torch.OutOfMemoryError: of the GPU's lanes.
        """
        inputs = [hidden_states, top_k_weights, *(lora.parameters() if lora is not None else ())]
        gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        again = training and not gradients and not torch.is_inference_mode_enabled()
        run = _Run(self, lora, record, gradients, keep=again)
        run.start(hidden_states.detach(), top_k_index, top_k_weights.detach())
        if meanwhile is not None:
            with run.settled():
                meanwhile(hidden_states)
        parameters = inputs[2:]
        if run.gradients and any(tensor.requires_grad for tensor in parameters):
            parameters = _Arrival.apply(run, *parameters)
            parameters[0].grad_fn._set_sequence_nr(0)
        out = _Laned.apply(run, hidden_states, top_k_index, top_k_weights, *parameters)
        assert isinstance(out, Tensor)
        if record is not None and torch.is_grad_enabled() and not out.requires_grad:
            record.count(run.index)
        return out

    def __post_init__(self) -> None:
        self.lanes.kept.add(self.kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> LanedExperts:
        return LanedExperts(self.lanes, self.layer, self.number, self.activation)


class _Run:
    """One forward of a layer, in two parts, and its backward."""

    index: Tensor  # [T, k] int64, in host memory
    weights: Tensor  # [T, k] fp32, likewise
    sums: Tensor  # [T] fp32, likewise: of each token's hidden states
    routing: Tensor  # the same on the device
    routes: Routes  # rows of the experts, on the device
    counts: Sequence[int]

    def __init__(
        self, owner: LanedExperts, lora: ExpertLora | None, record: Record | None, gradients: bool, keep: bool
    ) -> None:
        self.owner, self.lora, self.record, self.gradients, self.keep = owner, lora, record, gradients, keep
        self._forward: Pass | None = None
        self._out: Tensor | None = None
        self._saved: Any = None  # the CPU lane's, under `retain`
        self._cpu: Future[Any] | None = None
        self._idle: Future[None] | None = None  # of gradients of experts without rows

    def start(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        """Send host memory what it needs, decide, and set the CPU to work."""
        owner, lanes = self.owner, self.owner.lanes
        self.routing = weights.float().contiguous()
        # A token's sum that is finite proves that all of it is, in one kernel
        routing = lanes.crossing.to_host(index.to(torch.int64), self.routing, hidden.sum(1, dtype=torch.float32))
        arriving = self._to_host(hidden) if lanes.needs_cpu(owner.layer) and not self._may_be_kept() else None
        with spans.span("wait", owner.number):
            self.index, self.weights, self.sums = routing.wait()
        if not np.isfinite(self.sums.numpy()).all() and not torch.isfinite(hidden).all():
            raise ValueError(_not_finite(owner.layer.name, hidden))
        kept = owner.kept.pop(self._inputs(), self.lora) if self._may_be_kept() else None
        if kept is not None:
            self._out, self.routes = kept
            self.counts = self.routes.counts
            return
        self.counts = rows_of(owner.layer, self.index)
        self.routes = Routes(index, self.counts)
        retains = self.gradients and owner.activation == "retain"
        work = Work.BOTH if retains else Work.FORWARD
        self._forward = lanes.begin(owner.layer, self.counts, index.shape[1], self.lora, work)
        self._expect(self._forward)
        if self._forward.placement.cpu:
            self._cpu = lanes.submit(self._cpu_forward, arriving or self._to_host(hidden), self._forward)

    def _may_be_kept(self) -> bool:
        return self.gradients and len(self.owner.kept) > 0

    def _inputs(self) -> Inputs:
        return self.index, self.weights, self.sums

    def _cpu_forward(self, arriving: Arriving, run: Pass) -> Tensor:
        owner, experts = self.owner, run.placement.cpu
        here = only(self.index, experts, owner.layer.num_experts)
        (hidden,) = arriving.wait()
        out = owner.lanes.crossing.pinned(hidden.shape, hidden.dtype)
        activation = owner.activation if self.gradients else "none"
        with self._span(Where.CPU, experts, len(PROJECTIONS)):
            _, saved = owner.layer.forward(hidden, here, self.weights, self.lora, activation, out=out)
        self._saved = saved if activation == "retain" else None
        run.cpu_seconds = time.perf_counter() - run.began
        return out

    def settled(self) -> _Settled:
        """A context that an error leaves only when the CPU works no more: buffers and layers may go then."""
        return _Settled(self)

    def wait(self) -> None:
        """Until the CPU works no more, whatever became of it."""
        for each in (self._cpu, self._idle):
            if each is not None:
                each.exception()

    def finish(self, hidden: Tensor, index: Tensor) -> Tensor:
        """The GPU's experts, then the sum."""
        if self._out is not None:
            out, self._out = self._out, None  # autograd makes it this run's own: a cycle that only gc would end
            return out
        lanes, run = self.owner.lanes, self._forward
        assert run is not None
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        with self.settled():
            with lanes.timed(run):
                if run.on_gpu:
                    with self._copy_span(run), self._gpu_span(run, len(PROJECTIONS)):
                        given = self.routes, hidden.contiguous(), self.routing
                        lanes.gpu.forward(run.layer, run.on_gpu, *given, self.lora, total)
            lanes.end(run, 1)
            # A layer's copies are done when the next one has its routing; after the last one the caller may go on to
            # change the adapters
            if self.lora is not None and lanes.layers and lanes.layers[-1] is run.layer:
                lanes.gpu.settle()
        if self._cpu is not None:
            total += self._to_device(self._cpu_result())[0]
        if self.owner.seen is not None:
            self.owner.seen(run, self.counts)
        out = total.to(hidden.dtype)
        if self.keep:
            self.owner.kept.keep(self._inputs(), self.routes, self.lora, out)
        return out

    def backward(self, grad_output: Tensor, hidden: Tensor, index: Tensor, weights: Tensor, arrives: bool) -> Gradients:
        """Gradients of everything, on the devices of what they belong to.

        Those of LoRA may be on their way: `arrives` promises that `arrive` is called before anyone reads them.
        """
        lanes, layer = self.owner.lanes, self.owner.layer
        if self._saved is not None and self._forward is not None:
            run = lanes.again(self._forward, self.counts)
        else:
            run = lanes.begin(layer, self.counts, index.shape[1], self.lora, Work.BACKWARD)
        self._expect(run)
        grad_output = grad_output.to(hidden.dtype).contiguous()
        parameters = self.lora.parameters() if self.lora is not None else []
        lora_grads = self._room([tensor.shape for tensor in parameters])
        if run.placement.cpu:
            self._cpu = lanes.submit(self._cpu_backward, self._to_host(grad_output, hidden), run, lora_grads)
        elif lora_grads and 0 in self.counts:
            self._idle = lanes.submit(_zero_idle, lora_grads, self.counts)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weights = torch.zeros(weights.shape, dtype=torch.float32, device=weights.device)
        with self.settled():
            with lanes.timed(run):
                if run.on_gpu:
                    with self._copy_span(run), self._gpu_span(run, 2 * len(PROJECTIONS) - 1):
                        given = self.routes, hidden.contiguous(), grad_output, self.routing
                        lanes.gpu.backward(layer, run.on_gpu, *given, self.lora, grad_hidden, grad_weights, lora_grads)
            lanes.end(run, -1)
        if self._cpu is not None:
            found = self._cpu_result()
            parts = self._to_device(found.hidden_states, found.top_k_weights)
            grad_hidden += parts[0]
            grad_weights += parts[1]
        # Autograd itself reads gradients that it has to cast, or to look for NaN in
        if not arrives or torch.is_anomaly_enabled() or any(p.dtype != torch.float32 for p in parameters):
            self.arrive()
        lanes.observe(layer, self.counts)
        if self.record is not None:
            self.record.count(self.index)
            if self.record.watching:
                self.record.count_reached(index, weights, grad_output)
        lora = [grad.to(tensor.dtype) for grad, tensor in zip(lora_grads, parameters, strict=True)]
        return Gradients(grad_hidden.to(hidden.dtype), grad_weights.to(weights.dtype), lora)

    def arrive(self) -> None:
        """Until LoRA's gradients are there."""
        with spans.span("wait", self.owner.number):
            if self._idle is not None:
                self._idle.result()
                self._idle = None
            self.owner.lanes.gpu.finish()

    def _room(self, shapes: list[torch.Size]) -> list[Tensor]:
        """fp32 tensors in one piece of pinned memory, each aligned as a tensor of its own would be."""
        if not shapes:
            return []
        sizes = [-(-shape.numel() // _ALIGNED) * _ALIGNED for shape in shapes]
        parts = self.owner.lanes.crossing.pinned((sum(sizes),), torch.float32).split(sizes)
        return [part[: shape.numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def _cpu_backward(self, arriving: Arriving, run: Pass, lora_grads: list[Tensor]) -> Gradients:
        layer, lanes, experts = self.owner.layer, self.owner.lanes, run.placement.cpu
        here = only(self.index, experts, layer.num_experts)
        elsewhere = torch.zeros(layer.num_experts, dtype=torch.bool)
        elsewhere[run.on_gpu] = True
        again = self._saved is None
        saved = layer.prepare(here) if again else self._saved
        grad_output, hidden = arriving.wait()
        with self._span(Where.CPU, experts, len(PROJECTIONS) + (2 if again else 0)):
            found = layer.backward(
                saved,
                grad_output,
                hidden,
                here,
                self.weights,
                self.lora,
                elsewhere=elsewhere,
                lora_grads=lora_grads,
                grad_hidden=lanes.crossing.pinned(hidden.shape, hidden.dtype),
            )
        run.cpu_seconds = time.perf_counter() - run.began
        return found

    def _cpu_result(self) -> Any:
        assert self._cpu is not None
        with spans.span("wait", self.owner.number):
            result = self._cpu.result()
        self._cpu = None
        return result

    def _to_host(self, *tensors: Tensor) -> Arriving:
        crossing = self.owner.lanes.crossing
        with spans.device("copy_out", self.owner.number, crossing.out, bytes=sum(t.nbytes for t in tensors)):
            return crossing.to_host(*tensors)

    def _to_device(self, *tensors: Tensor) -> list[Tensor]:
        crossing = self.owner.lanes.crossing
        with spans.device("copy_in", self.owner.number, crossing.into, bytes=sum(t.nbytes for t in tensors)):
            return crossing.to_device(*tensors)

    def _copy_span(self, run: Pass) -> spans.Span:
        """Of the streamed experts' packed bytes; those that were begun ahead are not in it."""
        transfer, layer = self.owner.lanes.gpu.transfer, self.owner.layer
        stream = transfer.into if transfer.driver else None
        size = layer.packed_bytes * (len(run.placement.stream) - run.set_out) / layer.num_experts
        return spans.device("copy_in", self.owner.number, stream, bytes=size)

    def _gpu_span(self, run: Pass, products: int) -> spans.Span:
        transfer = self.owner.lanes.gpu.transfer
        stream = transfer.compute() if transfer.driver else None
        return self._span(Where.STREAM if run.placement.stream else Where.RESIDENT, run.on_gpu, products, stream)

    def _span(self, name: Where, experts: list[int], products: int, stream: Any = None) -> spans.Span:
        """Of so many products with these experts' matrices."""
        layer = self.owner.layer
        rows = sum(map(self.counts.__getitem__, experts))
        return spans.device(
            name,
            self.owner.number,
            stream,
            bytes=layer.packed_bytes * len(experts) / layer.num_experts,
            flops=2 * products * rows * layer.hidden_size * layer.intermediate_size,
        )

    def _expect(self, run: Pass) -> None:
        seconds = run.placement.seconds
        gpu = Where.STREAM if run.placement.stream else Where.RESIDENT
        spans.expect(self.owner.number, {Where.CPU: seconds[Lane.CPU], gpu: max(seconds[Lane.COPY], seconds[Lane.GPU])})


class _Settled:
    def __init__(self, run: _Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._run.wait()


class _Laned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: _Run, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *ab: Tensor
    ) -> Tensor:
        ctx.run = run
        # save_for_backward lets autograd notice an in-place change of a tensor that backward still needs
        ctx.save_for_backward(hidden_states, top_k_index, top_k_weights, *ab)
        return run.finish(hidden_states, top_k_index)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, top_k_index, top_k_weights, *_ = ctx.saved_tensors
        arrives = any(ctx.needs_input_grad[4:])  # then these inputs are an `_Arrival`'s
        grads = ctx.run.backward(grad_outputs[0], hidden_states, top_k_index, top_k_weights, arrives)
        return None, grads.hidden_states, None, grads.top_k_weights, *grads.lora


class _Arrival(torch.autograd.Function):
    """LoRA's tensors as they are; in backward it waits for their gradients.

    Its place in autograd's order is the last: attention's backward is given to the GPU before anyone waits.
    """

    @staticmethod
    def forward(ctx: Any, run: _Run, *ab: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        return ab

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.run.arrive()
        return None, *grads


def _zero_idle(lora_grads: list[Tensor], counts: Sequence[int]) -> None:
    """What the CPU lane does besides its own experts."""
    idle = [expert for expert, rows in enumerate(counts) if rows == 0]
    for grad in lora_grads:
        grad.numpy()[idle] = 0  # in this thread alone


def _not_finite(name: str, hidden: Tensor) -> str:
    token = int((~torch.isfinite(hidden).all(1)).nonzero()[0])
    return (
        f"{name}: hidden states hold NaN or Inf (token {token} of {len(hidden)}). The layers before this one produced "
        "it: look for a too high learning rate, fp16 overflow (use bf16: true) or damaged weights"
    )
