"""Frozen bf16 experts as stock torch computes them on the CPU, without LoRA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.layers import Batch, Weights
from benchmarks.peer import Job, Peer

Experts = Callable[[Weights, Tensor, Tensor, Tensor], Tensor]


def eager(w: Weights, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """One bf16 matmul (oneDNN) per expert and projection, as eager models do."""
    out = torch.zeros_like(x)
    for expert in index.unique().tolist():
        token, slot = torch.where(index == expert)
        rows = x[token]
        h = F.silu(F.linear(rows, w["gate_proj"][expert])) * F.linear(rows, w["up_proj"][expert])
        y = F.linear(h, w["down_proj"][expert]) * weights[token, slot, None].to(x.dtype)
        out = out.index_add(0, token, y)
    return out


def grouped(w: Weights, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Tokens sorted by expert, then one `torch._grouped_mm` per projection."""
    order = index.flatten().argsort(stable=True)
    token = order // index.shape[1]
    ends = index.flatten().bincount(minlength=len(w["gate_proj"])).cumsum(0).to(torch.int32)

    def product(rows: Tensor, name: str) -> Tensor:
        return torch._grouped_mm(rows, w[name].transpose(1, 2), offs=ends)

    rows = x[token]
    y = product(F.silu(product(rows, "gate_proj")) * product(rows, "up_proj"), "down_proj")
    return torch.zeros_like(x).index_add(0, token, y * weights.flatten()[order, None].to(x.dtype))


class TorchRunner:
    """Runs one of the functions above over copies of the weights."""

    has_backward = True

    def __init__(self, experts: Experts, job: Job) -> None:
        self.experts = experts
        more = [{name: tensor.clone() for name, tensor in job.weights.items()} for _ in range(job.copies - 1)]
        self.copies = cycle([job.weights, *more])

    def forward(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return self.experts(next(self.copies), batch.x, batch.index, batch.weights)

    def train(self, batch: Batch) -> Callable[[], object]:
        """Forward under autograd; the backward gives gradients of hidden states and routing weights."""
        x, weights = batch.x.detach().requires_grad_(), batch.weights.detach().requires_grad_()
        out = self.experts(next(self.copies), x, batch.index, weights)
        return lambda: out.backward(batch.grad_output)


def _no_grouped_mm() -> str:
    """torch's private function must exist and take bf16 on the CPU."""
    rows, weights = torch.zeros(16, 32, dtype=torch.bfloat16), torch.zeros(2, 32, 32, dtype=torch.bfloat16)
    try:
        torch._grouped_mm(rows, weights, offs=torch.tensor([16, 16], dtype=torch.int32))
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return f"torch {torch.__version__} has no CPU _grouped_mm: {str(error).splitlines()[0]}"
    return ""


TORCH_PEERS = (
    Peer("torch-eager", partial(TorchRunner, eager)),
    Peer("torch-grouped", partial(TorchRunner, grouped), _no_grouped_mm),
)
