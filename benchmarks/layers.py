"""Random weights, adapters and batches for the cases, and ktft's layers made from them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.cases import Case, Shape
from ktft import native
from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora, LoraPair
from ktft.model.autograd import routed_experts

Weights = dict[str, Tensor]  # projection -> [E, out_features, in_features] bf16


@dataclass(frozen=True)
class Batch:
    """One call's inputs: `x` and `grad_output` `[T, H]` bf16, `index` `[T, k]` int64, `weights` `[T, k]` fp32."""

    x: Tensor
    index: Tensor
    weights: Tensor
    grad_output: Tensor

    def around(self, num_experts: int) -> Iterator[Batch]:
        """The same tokens again and again, at other experts each time, because few experts would stay in the caches."""
        stride = len(self.index.unique())
        shifted = [replace(self, index=(self.index + first) % num_experts) for first in range(0, num_experts, stride)]
        return itertools.cycle(shifted)


class Runner(Protocol):
    """One implementation of the layer, ready to run. Successive calls use different copies of the weights."""

    has_backward: bool

    def forward(self, batch: Batch) -> Tensor:
        """The output `[T, H]` of a forward without a backward."""

    def train(self, batch: Batch) -> Callable[[], object]:
        """Run forward and keep what backward needs. Returns the backward."""


def make_weights(shape: Shape) -> Weights:
    """Random bf16 weights of a layer, as a checkpoint would hold them."""
    return {
        name: torch.stack(
            [torch.randn(shape.dims(name), dtype=torch.bfloat16).div_(64) for _ in range(shape.num_experts)]
        )
        for name in PROJECTIONS
    }


def make_lora(shape: Shape, rank: int) -> ExpertLora | None:
    """Random fp32 adapters of all projections; None for rank 0."""
    if rank == 0:
        return None
    pairs = {}
    for name in PROJECTIONS:
        outputs, inputs = shape.dims(name)
        a = torch.randn(shape.num_experts, rank, inputs) / inputs**0.5
        b = torch.randn(shape.num_experts, outputs, rank) / (64 * rank**0.5)
        pairs[name] = LoraPair(a.requires_grad_(), b.requires_grad_(), 1.0)
    return ExpertLora(pairs)


def make_index(case: Case) -> Tensor:
    """Random routing `[T, k]`. An expert's weight is 1 (uniform), or 1 / its rank in a random order (zipf)."""
    popularity = torch.zeros(case.shape.num_experts)
    if case.routing == "zipf":
        popularity = -torch.log1p(torch.randperm(case.shape.num_experts).float())
    # The k largest of log-weight + Gumbel noise are k draws without replacement.
    noise = -torch.log(torch.empty(case.tokens, case.shape.num_experts).exponential_())
    return (popularity + noise).topk(case.shape.top_k).indices


def make_batch(case: Case) -> Batch:
    """Random tokens, routed by `make_index`."""
    index = make_index(case)
    weights = torch.rand(index.shape) + 0.5
    x, grad = (torch.randn(case.tokens, case.shape.hidden_size, dtype=torch.bfloat16) for _ in range(2))
    return Batch(x, index, weights / weights.sum(-1, keepdim=True), grad)


def _pack(shape: Shape, fmt: str, runtime: native.Runtime, weights: Weights) -> native.ExpertLayer:
    layer = native.ExpertLayer(
        runtime,
        num_experts=shape.num_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        format=fmt,
    )
    for name, stacked in weights.items():
        for expert, weight in enumerate(stacked):
            layer.load(expert, name, weight)
    return layer


class Ktft:
    """ktft's own layer, in more copies than the caches hold. With `w8a8`, `forward_w8a8` is timed too."""

    has_backward = True

    def __init__(
        self,
        shape: Shape,
        fmt: str,
        runtime: native.Runtime,
        weights: Weights,
        lora: ExpertLora | None,
        w8a8: bool = False,
    ) -> None:
        self.lora, self.w8a8 = lora, w8a8
        self.layers = [_pack(shape, fmt, runtime, weights)]
        copies = machine.copies(self.layers[0].packed_bytes)
        self.layers += [_pack(shape, fmt, runtime, weights) for _ in range(copies - 1)]
        self._copies = itertools.cycle(self.layers)

    @property
    def layer_bytes(self) -> int:
        """Packed bytes of one copy."""
        return self.layers[0].packed_bytes

    def forward(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return routed_experts(next(self._copies), batch.x, batch.index, batch.weights, self.lora)

    def forward_w8a8(self, batch: Batch) -> Tensor:
        """`forward` with 8-bit activations. Raises ValueError where the layer cannot."""
        layer = next(self._copies)
        return layer.forward(batch.x, batch.index, batch.weights, self.lora, "none", activation_bits=8)[0]

    def train(self, batch: Batch) -> Callable[[], object]:
        """Forward under autograd; the backward gives every gradient of a training step."""
        for pair in self.lora.pairs.values() if self.lora else ():
            pair.a.grad = pair.b.grad = None
        x, weights = batch.x.detach().requires_grad_(), batch.weights.detach().requires_grad_()
        out = routed_experts(next(self._copies), x, batch.index, weights, self.lora)
        return lambda: out.backward(batch.grad_output)
