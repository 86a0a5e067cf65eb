"""One autograd node per MoE layer: native forward, native backward, exact gradients for every differentiable input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktft import spans
from ktft.lanes.record import Record
from ktft.lanes.routes import rows_of
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer


class _Moe(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        layer: ExpertLayer,
        activation: str,
        lora: ExpertLora | None,
        record: Record | None,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *ab: Tensor,
    ) -> Tensor:
        needs_backward = any(ctx.needs_input_grad)
        number = None if record is None else record.layer
        with spans.span("wait", number):
            hidden, index, weights = (t.detach().to("cpu") for t in (hidden_states, top_k_index, top_k_weights))
        with spans.span("cpu", number) as span:
            out, saved = layer.forward(hidden, index, weights, lora, activation if needs_backward else "none")
            rows_of(layer, index)  # refuses what only the layer's own callers may say: that a row is computed elsewhere
            note_work(span, layer, index, len(layer.projections))
        ctx.layer, ctx.lora, ctx.record, ctx.saved = layer, lora, record, saved
        each = len(layer.projections)
        ctx.products = 2 * each - 1 if activation == "recompute" else each
        # save_for_backward lets autograd notice an in-place change of a tensor that backward still needs
        ctx.save_for_backward(hidden_states, top_k_index, top_k_weights, *ab)
        return out.to(hidden_states.device)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        hidden_states, top_k_index, top_k_weights, *_ = ctx.saved_tensors
        tensors = grad_outputs[0], hidden_states, top_k_index, top_k_weights
        record, number = ctx.record, None if ctx.record is None else ctx.record.layer
        with spans.span("wait", number):
            grad, hidden, index, weights = (tensor.detach().to("cpu") for tensor in tensors)
        with spans.span("cpu", number) as span:
            grads = ctx.layer.backward(ctx.saved, grad, hidden, index, weights, ctx.lora)
            note_work(span, ctx.layer, index, ctx.products)
        if record is not None:
            record.count(index)
            if record.watching:
                record.count_reached(index, weights, grad)
        grad_hidden = grads.hidden_states.to(hidden_states.device)
        grad_weights = grads.top_k_weights.to(top_k_weights.device, top_k_weights.dtype)
        return None, None, None, None, grad_hidden, None, grad_weights, *grads.lora


def note_work(span: spans.Span, layer: ExpertLayer, top_k_index: Tensor, products: int) -> None:
    """Record the bytes and FLOPs of `products` products with the chosen experts' matrices, without LoRA."""
    if spans.RECORDER.on:
        share = products / len(layer.projections)
        counts = torch.bincount(top_k_index[top_k_index >= 0], minlength=layer.num_experts)
        span.bytes = share * layer.packed_bytes * int(counts.count_nonzero()) / layer.num_experts
        span.flops = products * 2 * int(counts.sum()) * layer.hidden_size * layer.intermediate_size


def routed_experts(
    layer: ExpertLayer,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    lora: ExpertLora | None = None,
    activation: str = "retain",
    record: Record | None = None,
) -> Tensor:
    """Run one layer's routed experts on the CPU, wherever the hidden states live.

    Args:
        layer: the packed experts.
        hidden_states: `[T, H]` float, CPU or CUDA.
        top_k_index: `[T, k]` integer; top_k_weights: `[T, k]` float.
        lora: adapters to apply; their tensors receive fp32-accumulated gradients in their own dtype.
        activation: `retain` keeps gate/up outputs for backward, `recompute` computes them again.
        record: takes counts, and knows the layer's number for `ktft.spans`.

    Returns:
        `[T, H]`, dtype and device of `hidden_states`.

    Raises:
        ValueError: shapes, dtypes or expert numbers do not fit the layer, or hidden states hold NaN or Inf.
    """
    ab = lora.parameters() if lora is not None else []
    out = _Moe.apply(layer, activation, lora, record, hidden_states, top_k_index, top_k_weights, *ab)
    assert isinstance(out, Tensor)
    if record is not None and torch.is_grad_enabled() and not out.requires_grad:
        record.count(top_k_index.to("cpu"))  # of a layer beneath all that trains, which gets no backward
    return out
