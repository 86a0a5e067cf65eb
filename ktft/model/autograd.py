"""One autograd node per MoE layer: native forward, native backward, exact gradients for every differentiable input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora, LoraPair
from ktft.native import ExpertLayer


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: ExpertLayer,
        activation: str,
        lora: ExpertLora | None,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *ab: Tensor,
    ) -> Tensor:
        needs_backward = any(ctx.needs_input_grad)
        out, saved = layer.forward(
            hidden_states.detach().to("cpu"),
            top_k_index.detach().to("cpu"),
            top_k_weights.detach().to("cpu"),
            lora,
            activation=activation if needs_backward else "none",
        )
        ctx.layer, ctx.lora, ctx.saved = layer, lora, saved
        # save_for_backward lets autograd notice an in-place change of a tensor that backward still needs
        ctx.save_for_backward(hidden_states, top_k_index, top_k_weights, *ab)
        return out.to(hidden_states.device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, top_k_index, top_k_weights, *_ = ctx.saved_tensors
        grads = ctx.layer.backward(
            ctx.saved,
            grad_outputs[0].detach().to("cpu"),
            hidden_states.detach().to("cpu"),
            top_k_index.to("cpu"),
            top_k_weights.detach().to("cpu"),
            ctx.lora,
        )
        return (
            None,
            None,
            None,
            grads.hidden_states.to(hidden_states.device),
            None,
            grads.top_k_weights.to(top_k_weights.device, top_k_weights.dtype),
            *grads.lora,
        )


def routed_experts(
    layer: ExpertLayer,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    lora: ExpertLora | None = None,
    activation: str = "retain",
) -> Tensor:
    """Run one layer's routed experts on the CPU, wherever the hidden states live.

    Args:
        layer: the packed experts.
        hidden_states: `[T, H]` float, CPU or CUDA.
        top_k_index: `[T, k]` integer; top_k_weights: `[T, k]` float.
        lora: adapters to apply; their tensors receive fp32-accumulated gradients in their own dtype.
        activation: `retain` keeps gate/up outputs for backward, `recompute` computes them again.

    Returns:
        `[T, H]`, dtype and device of `hidden_states`.

    Raises:
        ValueError: shapes, dtypes or expert numbers do not fit the layer, or hidden states hold NaN or Inf.
    """
    ab: list[Tensor] = []
    if lora is not None:
        for name in PROJECTIONS:
            pair: LoraPair | None = lora.pairs.get(name)
            ab += [pair.a, pair.b] if pair is not None else []
    out = _Moe.apply(layer, activation, lora, hidden_states, top_k_index, top_k_weights, *ab)
    assert isinstance(out, Tensor)
    return out
