"""One call of a layer in steady passes (`ktft.lanes.gpu.steady`): nothing on its way waits for the host's answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ktft import spans
from ktft.lanes.gpu.call_memory import PassReport
from ktft.lanes.lanes import DeviceLanes
from ktft.lanes.record import Record
from ktft.lanes.routes import wrong_expert
from ktft.lanes.terms import Work
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer


@dataclass(eq=False)
class SteadyCall:
    """A call whose output is known, with what its backward needs.

    Attributes:
        number: of the decoder layer.
        told: what makes the `PassReport` of the forward that made the output.
        out: the output; None once it was taken.
        room: makes memory for LoRA's gradients of these shapes.
        gates: gate and up of its routes, until backward; None if they were not kept.
        owes: LoRA's gradients do not go through autograd.
    """

    lanes: DeviceLanes
    layer: ExpertLayer
    number: int
    lora: ExpertLora | None
    record: Record | None
    told: Tensor
    out: Tensor | None
    room: Callable[[list[torch.Size]], list[Tensor]]
    gates: Tensor | None = None
    owes: bool = False

    def backward(
        self, grad_output: Tensor, hidden: Tensor, index: Tensor, weights: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of hidden states, routing weights and LoRA's tensors. LoRA's may be in flight until `wait`."""
        parameters = self.lora.parameters() if self.lora is not None else []
        grads = self.room([each.shape for each in parameters])
        gates, self.gates = self.gates, None  # a second backward computes them again
        given = hidden, grad_output.to(hidden.dtype), index, weights, self.lora, grads, gates
        again = gates is None
        with self.lanes.steady_pass(self.layer, self.number, index.numel(), Work.BACKWARD, again) as lane:
            of_hidden, of_weights, told = lane.backward(self.layer, *given)
        self.lanes.look_later(self.told, told, partial(self._look, len(hidden)))
        if self.record is not None and self.record.watching:
            self.record.count_reached(index, weights, grad_output)
        if self.owes:
            self.lanes.owe(self.layer, self.lanes.gpu.arrival(), parameters, grads)
            return of_hidden, of_weights.to(weights.dtype), *(None for _ in grads)
        if torch.is_anomaly_enabled() or any(each.dtype != torch.float32 for each in parameters):
            self.wait()  # autograd itself reads gradients that it must cast, or search for NaN
        lora = [grad.to(each.dtype) for grad, each in zip(grads, parameters, strict=True)]
        return of_hidden, of_weights.to(weights.dtype), *lora

    def _look(self, tokens: int, told: PassReport) -> None:
        """Check and count the routing. Residents do not follow it, since a steady pass saves any expert's copy."""
        if told.bad_token >= 0:
            raise ValueError(not_finite(self.layer.name, told.bad_token, tokens))
        if told.stray:
            raise ValueError(wrong_expert(self.layer, told.stray))
        if self.record is not None:
            self.record.add(told.counts, tokens)

    def wait(self) -> None:
        """Wait until LoRA's gradients are in host memory."""
        with spans.span("wait", self.number):
            self.lanes.gpu.finish()


class Steady(torch.autograd.Function):
    """A `SteadyCall` in autograd's graph."""

    @staticmethod
    def forward(
        ctx: Any, call: SteadyCall, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *ab: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden_states, top_k_index, top_k_weights, *ab)
        ctx.call = call
        out, call.out = call.out, None  # autograd makes it refer to the call
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, top_k_index, top_k_weights, *_ = ctx.saved_tensors
        call: SteadyCall = ctx.call
        of_hidden, of_weights, *lora = call.backward(grad_outputs[0], hidden_states, top_k_index, top_k_weights)
        if not call.owes and not any(ctx.needs_input_grad[4:]):
            call.wait()
        return None, of_hidden, None, of_weights, *lora


def go_back(out: Tensor, grad: Tensor) -> bool:
    """Send the gradient of a steady call's output to the leaves that the call got. Returns False, and does nothing, if
    that takes autograd's engine, whose thread and the caller's would wait for each other and for the GIL: if something
    lies before or behind the call, for instance.
    """
    node: Any = out.grad_fn
    if not isinstance(node, Steady._backward_cls) or not node.call.owes or torch.is_anomaly_enabled():
        return False
    before = [function for function, _ in node.next_functions]
    if not all(each is None or hasattr(each, "variable") for each in before):
        return False
    with torch.no_grad():
        _, of_hidden, _, of_weights, *_ = node.apply(grad)
    for function, found in ((before[0], of_hidden), (before[2], of_weights)):
        if function is not None:
            leaf = function.variable
            leaf.grad = found if leaf.grad is None else leaf.grad + found
    return True


def not_finite(name: str, token: int, tokens: int) -> str:
    """The message for hidden states of so many tokens, of which this is the first with NaN or Inf."""
    return (
        f"{name}: hidden states hold NaN or Inf (token {token} of {tokens}). The layers before this one produced "
        "it: look for a too high learning rate, fp16 overflow (use bf16: true) or damaged weights"
    )
