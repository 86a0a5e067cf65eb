"""One layer's routed experts in several lanes at once: on the CPU, streamed to the GPU, and resident there."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ktft.lanes.crossing import Arriving
from ktft.lanes.kept import KeptOutputs
from ktft.lanes.lanes import Lanes
from ktft.lanes.placement import Placement
from ktft.lora import ExpertLora
from ktft.model.record import Record
from ktft.native import ExpertLayer, Gradients


@dataclass
class LanedExperts:
    """One layer's experts, and the lanes that they run in.

    Attributes:
        lanes: of the model.
        layer: the packed experts.
        number: of the decoder layer.
        activation: of the CPU lane, `retain` or `recompute`. The GPU lanes always compute gate and up again.
        kept: outputs for checkpointing's second forward.
    """

    lanes: Lanes
    layer: ExpertLayer
    number: int
    activation: str
    kept: KeptOutputs = field(default_factory=KeptOutputs)

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
            meanwhile: gives the GPU independent work, once the CPU has its own.

        Raises:
            ValueError: as there; RuntimeError: a lane failed, which the message names.
        """
        inputs = [hidden_states, top_k_weights, *(lora.parameters() if lora is not None else ())]
        gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        run = _Run(self, lora, record, gradients, keep=training and not gradients)
        run.start(hidden_states.detach(), top_k_index, top_k_weights.detach())
        if meanwhile is not None:
            try:
                meanwhile(hidden_states)
            except BaseException:
                run.wait()
                raise
        out = _Laned.apply(run, hidden_states, top_k_index, top_k_weights, *inputs[2:])
        assert isinstance(out, Tensor)
        if record is not None and torch.is_grad_enabled() and not out.requires_grad:
            record.count(run.index)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> LanedExperts:
        return LanedExperts(self.lanes, self.layer, self.number, self.activation)


class _Run:
    """One forward of a layer, in two parts, and its backward."""

    index: Tensor  # [T, k] int64, in host memory
    weights: Tensor  # [T, k] fp32, likewise
    counts: list[int]
    placement: Placement

    def __init__(
        self, owner: LanedExperts, lora: ExpertLora | None, record: Record | None, gradients: bool, keep: bool
    ) -> None:
        self.owner, self.lora, self.record, self.gradients, self.keep = owner, lora, record, gradients, keep
        self._out: Tensor | None = None
        self._saved: Any = None  # the CPU lane's, under `retain`
        self._cpu: Future[Tensor] | None = None

    def start(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        """Send host memory what it needs, decide, and set the CPU to work."""
        owner, lanes = self.owner, self.owner.lanes
        routing = lanes.crossing.to_host(index.to(torch.int64), weights.float(), torch.isfinite(hidden).all())
        arriving = lanes.crossing.to_host(hidden)
        self.index, self.weights, finite = routing.wait()
        if not finite:
            raise ValueError(_not_finite(owner.layer.name, hidden))
        self.counts = lanes.count(owner.layer, self.index)
        if self.gradients:
            self._out = owner.kept.take(self.index, self.weights, self.lora)
        if self._out is not None:
            return
        self.placement = lanes.place(owner.layer, self.counts, "forward")
        if self.placement.cpu:
            here = lanes.only(self.index, self.placement.cpu, owner.layer.num_experts)
            self._cpu = lanes.submit(self._cpu_forward, arriving, here)

    def _cpu_forward(self, arriving: Arriving, index: Tensor) -> Tensor:
        (hidden,) = arriving.wait()
        out = self.owner.lanes.crossing.pinned(hidden.shape, hidden.dtype)
        activation = self.owner.activation if self.gradients else "none"
        began = time.perf_counter()
        _, saved = self.owner.layer.forward(hidden, index, self.weights, self.lora, activation, out=out)
        if self.record is not None:
            self.record.forward_seconds += time.perf_counter() - began
        self._saved = saved if activation == "retain" else None
        return out

    def wait(self) -> None:
        """Until the CPU works no more, whatever became of it."""
        if self._cpu is not None:
            self._cpu.exception()

    def finish(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """The GPU's experts, then the sum."""
        if self._out is not None:
            return self._out
        lanes, placement = self.owner.lanes, self.placement
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        try:
            if on_gpu := placement.resident + placement.stream:
                routes = lanes.routes(index, self.counts, on_gpu)
                lanes.gpu.forward(self.owner.layer, on_gpu, routes, hidden, weights, self.lora, total)
        except BaseException:
            self.wait()
            raise
        if self._cpu is not None:
            total += lanes.crossing.to_device(self._cpu.result())[0]
        lanes.finished(self.owner.layer, placement, "forward")
        self._cpu = None
        out = total.to(hidden.dtype)
        if self.keep:
            self.owner.kept.keep(self.index, self.weights, self.lora, out)
        return out

    def backward(self, grad_output: Tensor, hidden: Tensor, index: Tensor, weights: Tensor) -> Gradients:
        """Gradients of everything, on the devices of what they belong to."""
        owner, lanes, layer = self.owner, self.owner.lanes, self.owner.layer
        if self._saved is None:
            self.placement = lanes.place(layer, self.counts, "backward")
        placement, grad_output = self.placement, grad_output.to(hidden.dtype)
        parameters = self.lora.parameters() if self.lora is not None else []
        lora_grads = [lanes.crossing.pinned(tensor.shape, torch.float32) for tensor in parameters]
        cpu: Future[Gradients] | None = None
        if placement.cpu:
            cpu = lanes.submit(self._cpu_backward, lanes.crossing.to_host(grad_output, hidden), lora_grads)
        else:
            _zero_idle(lora_grads, self.counts)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        grad_weights = torch.zeros(weights.shape, dtype=torch.float32, device=weights.device)
        try:
            if on_gpu := placement.resident + placement.stream:
                routes = lanes.routes(index, self.counts, on_gpu)
                lanes.gpu.backward(
                    layer, on_gpu, routes, hidden, grad_output, weights, self.lora, grad_hidden, grad_weights, lora_grads
                )
        except BaseException:
            if cpu is not None:
                cpu.exception()
            raise
        if cpu is not None:
            found = cpu.result()
            for total, part in zip(
                (grad_hidden, grad_weights),
                lanes.crossing.to_device(found.hidden_states, found.top_k_weights),
                strict=True,
            ):
                total += part
        lanes.gpu.finish()
        lanes.finished(owner.layer, placement, "backward")
        if self.record is not None:
            self.record.count(self.index)
            if self.record.watching:
                self.record.count_reached(index, weights, grad_output)
        lora = [grad.to(tensor.dtype) for grad, tensor in zip(lora_grads, parameters, strict=True)]
        return Gradients(grad_hidden.to(hidden.dtype), grad_weights.to(weights.dtype), lora)

    def _cpu_backward(self, arriving: Arriving, lora_grads: list[Tensor]) -> Gradients:
        layer, lanes, experts = self.owner.layer, self.owner.lanes, self.placement.cpu
        here = lanes.only(self.index, experts, layer.num_experts)
        elsewhere = torch.zeros(layer.num_experts, dtype=torch.bool)
        elsewhere[self.placement.resident + self.placement.stream] = True
        saved = layer.prepare(here) if self._saved is None else self._saved
        grad_output, hidden = arriving.wait()
        began = time.perf_counter()
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
        if self.record is not None:
            self.record.backward_seconds += time.perf_counter() - began
        return found


class _Laned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: _Run, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *ab: Tensor
    ) -> Tensor:
        ctx.run = run
        # save_for_backward lets autograd notice an in-place change of a tensor that backward still needs
        ctx.save_for_backward(hidden_states, top_k_index, top_k_weights, *ab)
        return run.finish(hidden_states, top_k_index, top_k_weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, top_k_index, top_k_weights, *_ = ctx.saved_tensors
        grads = ctx.run.backward(grad_outputs[0], hidden_states, top_k_index, top_k_weights)
        return None, grads.hidden_states, None, grads.top_k_weights, *grads.lora


def _zero_idle(lora_grads: list[Tensor], counts: list[int]) -> None:
    """What the CPU lane does besides its own experts."""
    idle = torch.tensor([expert for expert, rows in enumerate(counts) if rows == 0], dtype=torch.int64)
    for grad in lora_grads if len(idle) else ():
        grad.index_fill_(0, idle, 0)


def _not_finite(name: str, hidden: Tensor) -> str:
    token = int((~torch.isfinite(hidden).all(1)).nonzero()[0])
    return (
        f"{name}: hidden states hold NaN or Inf (token {token} of {len(hidden)}). The layers before this one produced "
        "it: look for a too high learning rate, fp16 overflow (use bf16: true) or damaged weights"
    )
