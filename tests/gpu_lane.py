"""A layer's experts in `GpuLane`, as an autograd node over whole passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.routes import Routes
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer


class Lane:
    """A `GpuLane` as `contract.compare` calls it, for these experts or for all."""

    def __init__(self, lane: GpuLane, experts: list[int] | None = None) -> None:
        self.lane, self.experts = lane, experts

    def __call__(
        self, layer: ExpertLayer, x: Tensor, index: Tensor, weights: Tensor, lora: ExpertLora | None = None, *_: Any
    ) -> Tensor:
        out = _Experts.apply(self, layer, lora, x, index, weights, *(lora.parameters() if lora else []))
        assert isinstance(out, Tensor)
        return out


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, caller: Lane, layer: ExpertLayer, lora: Any, x: Tensor, index: Tensor, weights: Tensor, *ab: Tensor
    ) -> Tensor:
        counts = torch.bincount(index.flatten(), minlength=layer.num_experts).tolist()
        experts = list(range(layer.num_experts)) if caller.experts is None else caller.experts
        inputs = Routes(index, counts), x.detach(), weights.detach().float()
        ctx.caller, ctx.layer, ctx.lora, ctx.inputs, ctx.experts = caller.lane, layer, lora, inputs, experts
        out = torch.zeros(x.shape)
        caller.lane.forward(layer, experts, *inputs, lora, out)
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        routes, x, weights = ctx.inputs
        grad_x, grad_weights = torch.zeros(x.shape), torch.zeros_like(weights)
        grads = [torch.zeros(p.shape) for p in (ctx.lora.parameters() if ctx.lora else [])]
        gradients = grad_outputs[0].contiguous(), weights, ctx.lora, grad_x, grad_weights, grads
        ctx.caller.backward(ctx.layer, ctx.experts, routes, x, *gradients)
        ctx.caller.finish()
        return None, None, None, grad_x.to(x.dtype), None, grad_weights, *grads


def run_layer(lane: GpuLane, layer: ExpertLayer, lora: ExpertLora | None, *inputs: Tensor) -> list[Tensor]:
    """Output and gradients of hidden states, routing weights and adapters."""
    x = inputs[0].detach().requires_grad_()
    weights = inputs[2].detach().float().requires_grad_()
    parameters = [p.requires_grad_() for p in (lora.parameters() if lora else [])]
    out = Lane(lane)(layer, x, inputs[1], weights, lora)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, weights, *parameters])]
