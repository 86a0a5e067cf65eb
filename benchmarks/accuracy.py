"""Compares the layer with the fp32 reference on a few tokens of a case's own batch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.cases import W8A8_STEP
from benchmarks.layers import Batch, Ktft
from ktft import reference
from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora, LoraPair
from ktft.model.autograd import routed_experts
from ktft.verify.contract import relative_error

SAMPLES = 4


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def _token(ktft: Ktft, batch: Batch, token: int) -> tuple[Tensor, list[Tensor], Tensor]:
    """One token's reference: its output, the gradients of x, routing weights and adapters, and the token's experts.

    Tokens are computed one at a time, so that only one token's experts in fp32 have to fit in memory.
    """
    layer, experts = ktft.layers[0], batch.index[token]
    gate, up, down = (
        torch.stack([layer.dequantize(expert, name) for expert in experts.tolist()]) for name in PROJECTIONS
    )
    lora = None
    if ktft.lora is not None:
        pairs = ktft.lora.pairs.items()
        lora = ExpertLora({n: LoraPair(_leaf(p.a[experts]), _leaf(p.b[experts]), p.scaling) for n, p in pairs})
    x, weights = _leaf(batch.x[token, None].float()), _leaf(batch.weights[token, None])
    out = reference.moe(x, torch.arange(len(experts))[None], weights, gate, up, down, lora)
    grads = torch.autograd.grad(
        out, [x, weights, *(lora.parameters() if lora else [])], batch.grad_output[token, None].float()
    )
    return out.detach(), list(grads), experts


def errors(ktft: Ktft, batch: Batch) -> dict[str, float]:
    """The largest relative L2 error of the output (`forward`, `forward-w8a8`) and of any gradient (`backward`).

    Only the sampled tokens get an output gradient, so the adapters' gradients come from these tokens alone.
    """
    tokens = torch.randperm(len(batch.x))[:SAMPLES].tolist()
    mask = torch.zeros(len(batch.x), 1, dtype=batch.x.dtype)
    mask[tokens] = 1
    sampled = replace(batch, grad_output=batch.grad_output * mask)
    leaves = [_leaf(batch.x), _leaf(batch.weights), *(ktft.lora.parameters() if ktft.lora else [])]
    out = routed_experts(ktft.layers[0], leaves[0], batch.index, leaves[1], ktft.lora)
    grads = torch.autograd.grad(out, leaves, sampled.grad_output)
    exact = [torch.zeros(grad.shape) for grad in grads]
    out_w8a8 = ktft.forward_w8a8(batch) if ktft.w8a8 else None
    forward: list[float] = []
    forward_w8a8: list[float] = []
    for token in tokens:
        y, wanted, experts = _token(ktft, sampled, token)
        forward.append(relative_error(out[token].detach(), y[0]))
        if out_w8a8 is not None:
            forward_w8a8.append(relative_error(out_w8a8[token], y[0]))
        exact[0][token], exact[1][token] = wanted[0][0], wanted[1][0]
        for total, part in zip(exact[2:], wanted[2:], strict=True):
            total[experts] += part
    backward = [relative_error(grad, total) for grad, total in zip(grads, exact, strict=True)]
    found = {"forward": max(forward), "backward": max(backward), "forward+backward": max(forward + backward)}
    return found | {W8A8_STEP: max(forward_w8a8)} if forward_w8a8 else found
