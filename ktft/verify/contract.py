"""The kernels' numeric contract on one layer: output and every gradient against `ktft.reference` on the packed weights.

The layer is called twice. In the first call each token has one expert, so an error belongs to one expert. In the second
call tokens have the model's `top_k` experts, under the other activation policy, which covers sorting and summing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ktft import reference
from ktft.config import ACTIVATIONS, PROJECTIONS
from ktft.lora import ExpertLora, LoraPair
from ktft.model.autograd import routed_experts
from ktft.native import ExpertLayer
from ktft.verify.problem import Problem

OUTPUT_LIMIT, GRADIENT_LIMIT = 0.005, 0.01
"""Limits for the layer and for each expert alone. Single experts with few tokens reach 0.3% and 0.5%, measured."""

RANK, SCALING = 4, 0.5  # of the random LoRA that is used without an adapter
LEAST_TOKENS = 4  # per expert, in the call with one expert per token
OUTPUT, HIDDEN, ROUTING = "output", "hidden_states gradient", "top_k_weights gradient"


@dataclass(frozen=True)
class ContractError:
    """One quantity's relative L2 errors: of the layer in the worse of both calls, and of the worst expert."""

    quantity: str
    relative: float
    worst_expert: int
    worst_relative: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether layer and worst expert are within their limits. NaN is not."""
        return self.relative <= self.limit and self.worst_relative <= self.limit

    def problem(self, layer: int) -> Problem:
        """The error as a problem: of the worst expert, or of the layer if every expert is within its limit."""
        first = self.quantity.partition(" ")[0]
        projection = first if first in PROJECTIONS else None
        if self.worst_relative <= self.limit:
            return Problem("contract", self.quantity, self.relative, self.limit, layer, None, projection)
        return Problem("contract", self.quantity, self.worst_relative, self.limit, layer, self.worst_expert, projection)


def random_lora(layer: ExpertLayer, generator: torch.Generator) -> ExpertLora:
    """Random adapters on all projections, scaled so that their products are about as large as the experts' inputs."""
    pairs = {}
    for name in layer.projections:
        fan_in, fan_out = layer.hidden_size, layer.intermediate_size
        if name == "down_proj":
            fan_in, fan_out = fan_out, fan_in
        a = torch.randn(layer.num_experts, RANK, fan_in, generator=generator) / math.sqrt(fan_in)
        b = torch.randn(layer.num_experts, fan_out, RANK, generator=generator) / math.sqrt(RANK * fan_in)
        pairs[name] = LoraPair(a, b, SCALING)
    return ExpertLora(pairs)


def check_contract(
    layer: ExpertLayer, lora: ExpertLora | None, top_k: int, tokens: int, seed: int
) -> list[ContractError]:
    """Compare a filled layer with the reference.

    Only one expert's weights are dequantized at a time, so beyond the layer only activations and LoRA take memory.

    Args:
        lora: adapters to compare gradients of; see `random_lora`.
        tokens: the approximate number of tokens per call; there are more if an expert would get too few.
        seed: the seed of hidden states and routing.

    Returns:
        One error per quantity: output, and gradients of hidden states, routing weights, and each projection's A and B.
    """
    generator = torch.Generator().manual_seed(seed)
    alone = _Call(layer, lora, _each_expert(layer.num_experts, tokens, generator), ACTIVATIONS[0], generator)
    mixed = _Call(layer, lora, _some_experts(layer.num_experts, top_k, tokens, generator), ACTIVATIONS[1], generator)
    for expert in range(layer.num_experts):
        weights = {name: layer.dequantize(expert, name)[None] for name in layer.projections}
        biases = {name: layer.bias(expert, name)[None] for name in layer.projections} if layer.biases else None
        for call in (alone, mixed):
            call.add_reference(expert, weights, biases)
    errors = []
    for quantity, actual in alone.actual.items():
        exact = alone.exact[quantity]
        by_expert = [
            relative_error(actual[rows], exact[rows])
            for rows in (alone.rows(quantity, expert) for expert in range(layer.num_experts))
        ]
        worst = max(range(layer.num_experts), key=lambda e: comparable(by_expert[e]))
        both = relative_error(actual, exact), relative_error(mixed.actual[quantity], mixed.exact[quantity])
        whole = max(both, key=comparable)
        limit = OUTPUT_LIMIT if quantity == OUTPUT else GRADIENT_LIMIT
        errors.append(ContractError(quantity, whole, worst, by_expert[worst], limit))
    return errors


def relative_error(value: Tensor, exact: Tensor) -> float:
    """The relative L2 error. If `exact` is zero, the error is 0 for an exact match and infinite otherwise."""
    difference, norm = float((value.float() - exact.float()).norm()), float(exact.float().norm())
    return difference / norm if norm else (0.0 if difference == 0 else math.inf)


def comparable(error: float) -> float:
    """The error as a key for `max` and `sort`, where NaN counts as infinite."""
    return math.inf if math.isnan(error) else error


def _each_expert(experts: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Random routing `[T, 1]` that uses every expert, some more often than others."""
    least = max(LEAST_TOKENS, tokens // experts)
    index = torch.arange(experts).repeat_interleave(torch.arange(experts) % 3 + least)
    return index[torch.randperm(len(index), generator=generator), None]


def _some_experts(experts: int, top_k: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Random routing `[tokens, top_k]`, with different experts for each token."""
    return torch.rand(tokens, experts, generator=generator).topk(min(top_k, experts)).indices


class _Call:
    """One call of the layer with its gradients, and the reference's results, summed expert by expert."""

    def __init__(
        self, layer: ExpertLayer, lora: ExpertLora | None, index: Tensor, activation: str, generator: torch.Generator
    ) -> None:
        self.layer, self.index = layer, index
        # The inputs are bf16 numbers: every bf16 model rounds its inputs, so that is not the kernels' error.
        self.x = torch.randn(len(index), layer.hidden_size, generator=generator).bfloat16().float().requires_grad_()
        weights = torch.rand(index.shape, generator=generator) + 0.5
        self.weights = (weights / weights.sum(1, keepdim=True)).requires_grad_()
        pairs = lora.pairs if lora is not None else {}
        self.lora = {
            n: LoraPair(p.a.detach().requires_grad_(), p.b.detach().requires_grad_(), p.scaling)
            for n, p in pairs.items()
        }
        leaves = {HIDDEN: self.x, ROUTING: self.weights}
        for name, pair in self.lora.items():
            leaves |= {f"{name} lora_A gradient": pair.a, f"{name} lora_B gradient": pair.b}
        out = routed_experts(
            layer, self.x, index, self.weights, ExpertLora(self.lora) if self.lora else None, activation
        )
        # grad_output points partly along the output. Otherwise gradients of routing weights would be small
        # differences of large numbers.
        size = out.detach().norm(dim=1, keepdim=True) / math.sqrt(layer.hidden_size)
        along = torch.nan_to_num(out.detach() / size.clamp_min(1e-30), posinf=0.0, neginf=0.0)
        self.grad_output = (along + torch.randn(out.shape, generator=generator)).bfloat16().float()
        grads = torch.autograd.grad(out, list(leaves.values()), self.grad_output)
        self.actual = {OUTPUT: out.detach()} | dict(zip(leaves, grads, strict=True))
        self.exact = {name: torch.zeros_like(tensor) for name, tensor in self.actual.items()}

    def add_reference(self, expert: int, weights: Mapping[str, Tensor], biases: dict[str, Tensor] | None) -> None:
        token, slot = torch.where(self.index == expert)
        if not len(token):
            return
        x = self.x.detach()[token].requires_grad_()
        routing = self.weights.detach()[token, slot, None].requires_grad_()
        pairs = {
            name: LoraPair(
                pair.a.detach()[expert, None].requires_grad_(),
                pair.b.detach()[expert, None].requires_grad_(),
                pair.scaling,
            )
            for name, pair in self.lora.items()
        }
        index = torch.zeros(len(token), 1, dtype=torch.int64)
        gate, up, down = (weights.get(name) for name in PROJECTIONS)
        assert up is not None and down is not None
        out = reference.moe(x, index, routing, gate, up, down, ExpertLora(pairs), self.layer.swiglu, biases)
        leaves = [x, routing, *(tensor for pair in pairs.values() for tensor in (pair.a, pair.b))]
        grads = torch.autograd.grad(out, leaves, self.grad_output[token])
        self.exact[OUTPUT].index_add_(0, token, out.detach())
        self.exact[HIDDEN].index_add_(0, token, grads[0])
        self.exact[ROUTING][token, slot] = grads[1][:, 0]
        for name, grad in zip(list(self.exact)[3:], grads[2:], strict=True):
            self.exact[name][expert] = grad[0]

    def rows(self, quantity: str, expert: int) -> Tensor | int:
        """The rows of one expert in a quantity, for the call with one expert per token."""
        return torch.where(self.index[:, 0] == expert)[0] if quantity in (OUTPUT, HIDDEN, ROUTING) else expert
