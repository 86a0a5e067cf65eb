"""The numeric contract of the kernels, shared by their tests: layers, adapters, inputs, oracles and tolerances.

Layers are compared with the fp32 reference on their dequantized weights. The relative L2 error may be 0.5% for outputs
and 1% for each gradient. bf16 rounding of activations, of SiLU's output and of gradients between two products each add
about 0.1% (2^-9 / sqrt(3)), independently.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ktft import native, reference
from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora, LoraPair
from ktft.model.autograd import routed_experts
from ktft.swiglu import Swiglu

OUTPUT_TOLERANCE, GRADIENT_TOLERANCE = 0.005, 0.01
EXPERTS, TOP_K = 5, 2
# Each route's weight has the gradient <direction, y>. With few routes these sums may all nearly cancel by chance, and
# then no relative error is bounded. Below this number the direction leans towards the output.
FEW_ROUTES = 16
# In `TAILS`, rows per expert: below, at and above the sizes of micro-kernels and chunks; 0 is an expert without tokens
CASES = sorted({(k["isa"], k["format"]) for k in native.kernels() if k["isa"] in native.isas()})
TAILS = [(1, 3, 7, 0, 9), (16, 17, 31, 0, 32), (0, 33, 64, 65, 2), (257, 1, 0, 0, 300)]
# By NUMA nodes: hidden size, intermediate size, LoRA rank, rows. Slices begin at multiples of 128.
SIZES = {
    1: [(96, 64, 64, TAILS[0]), (64, 160, 33, TAILS[1]), (160, 96, 8, TAILS[2]), (32, 32, 1, TAILS[3])],
    2: [(64, 256, 33, TAILS[0]), (32, 160, 64, TAILS[1]), (32, 160, 1, TAILS[2])],
    3: [(64, 288, 8, TAILS[0]), (32, 288, 33, TAILS[1])],
}
MORE_THAN_ONE_CALL = (0, 705, 2, 1409, 0)  # a GEMM call takes 704 rows, a gradient's reduction block 1024


NATIVE_TILES = "amx_bf16" in native.isas()

# NUMA nodes, threads, activation. One thread does these experts one by one, several threads all of them phase by phase
# (plan() in csrc/moe/forward.cc).
WAYS = [(1, 1, "retain"), (1, 1, "recompute"), (2, 2, "retain"), (3, 2, "recompute")]


def emulation_in_full(cases: Sequence[Any]) -> list[Any]:
    """These ISAs, or tuples that begin with one, as parameters.

    Emulated tiles are slow and share the code of native ones: where the CPU has those, `make test` leaves them out.
    """
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=[pytest.mark.full] * (NATIVE_TILES and row[0] == "amx_emu")) for row in rows]


def in_every_way(cases: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """Parameters `isa`, `fmt`, `nodes`, `threads` and `activation`: each ISA and format in each of the `WAYS`.

    Emulated tiles are slow and share the code of native ones. For them `make test` leaves out one single-node way for
    each format, in turn, so that any two values of different parameters still meet; where the CPU has native tiles, it
    leaves out all ways but one.
    """
    table = []
    for number, (isa, fmt) in enumerate(cases):
        left_out = []
        if isa == "amx_emu":
            one = number % len(WAYS)
            left_out = [*WAYS[:one], *WAYS[one + 1 :]] if NATIVE_TILES else [WAYS[number % 2]]
        for way in WAYS:
            marks = [pytest.mark.full] if way in left_out else []
            table.append(pytest.param(isa, fmt, *way, marks=marks))
    return pytest.mark.parametrize(("isa", "fmt", "nodes", "threads", "activation"), table)


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def empty_layer(
    hidden: int, intermediate: int, fmt: str, isa: str | None = None, threads: int = 1, nodes: int = 1, **options
) -> native.ExpertLayer:
    """A layer without weights. `options` are those of `ExpertLayer`."""
    sizes = {"num_experts": EXPERTS, "hidden_size": hidden, "intermediate_size": intermediate, "format": fmt}
    return native.ExpertLayer(native.runtime(threads, nodes, isa), **sizes | options)


def make_weights(hidden: int, intermediate: int) -> dict[tuple[int, str], Tensor]:
    """Weights by expert and projection. Afterwards torch's generator depends on these sizes alone."""
    torch.manual_seed(hidden + intermediate)
    shapes = {name: (hidden, intermediate) if name == "down_proj" else (intermediate, hidden) for name in PROJECTIONS}
    places = itertools.product(range(EXPERTS), shapes)
    return {(expert, name): torch.randn(shapes[name]) / shapes[name][1] ** 0.5 for expert, name in places}


def make_layer(hidden: int, intermediate: int, *args, weights=None, **options) -> native.ExpertLayer:
    """`empty_layer` with `make_weights` or other weights loaded, of the projections that it has."""
    layer = empty_layer(hidden, intermediate, *args, **options)
    for (expert, name), weight in (weights or make_weights(hidden, intermediate)).items():
        if name in layer.projections:
            layer.load(expert, name, weight)
    return layer


def dequantized(layer: native.ExpertLayer) -> list[Tensor | None]:
    """Gate, up and down; None for a gate that the experts do not have."""
    return [
        torch.stack([layer.dequantize(e, name) for e in range(EXPERTS)]) if name in layer.projections else None
        for name in PROJECTIONS
    ]


def make_lora(
    hidden: int, intermediate: int, rank: int, dtype: torch.dtype, names=PROJECTIONS, experts: int = EXPERTS, **kwargs
) -> ExpertLora:
    pairs = {}
    for name in names:
        inputs, outputs = (intermediate, hidden) if name == "down_proj" else (hidden, intermediate)
        a = torch.randn(experts, rank, inputs) / inputs**0.5
        b = torch.randn(experts, outputs, rank) / rank**0.5
        pairs[name] = LoraPair(a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_(), 0.5)
    return ExpertLora(pairs, **kwargs)


def inputs_for(rows: tuple[int, ...], hidden: int, dtype: torch.dtype = torch.bfloat16):
    """Tokens with two routes each, so that expert e gets rows[e] routes. For an odd sum, expert 0 gets one more."""
    routes = [e for e, count in enumerate(rows) for _ in range(count)]
    routes += [0] * (len(routes) % TOP_K)
    generator = torch.Generator().manual_seed(7)
    order = torch.randperm(len(routes), generator=generator)
    index = torch.tensor(routes, dtype=torch.int64)[order].view(-1, TOP_K)
    x = torch.randn(index.shape[0], hidden, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(index.shape, generator=generator).requires_grad_()
    return x, index, weights


def random_inputs(
    tokens: int, hidden: int, top_k: int = TOP_K, seed: int = 0, dtype: torch.dtype = torch.bfloat16, experts=EXPERTS
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, different experts for each token and their weights, none of which needs a gradient."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    index = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    return x, index, torch.rand(tokens, top_k, generator=generator)


def compare(
    layer, lora, x, index, weights, activation="retain", oracle=reference.moe, forward=routed_experts
) -> dict[str, float]:
    """Relative errors of the output and of each gradient."""
    leaves = {"hidden_states": x, "top_k_weights": weights}
    for name, pair in lora.pairs.items() if lora else ():
        leaves |= {f"{name}.lora_A": pair.a, f"{name}.lora_B": pair.b}
    out = forward(layer, x, index, weights, lora, activation)
    expected = oracle(x.float(), index, weights, *dequantized(layer), lora)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    if index.numel() < FEW_ROUTES:
        direction += expected.detach() / expected.detach().square().mean().sqrt()
    direction = direction.to(out.dtype)
    actual_grads = torch.autograd.grad(out, list(leaves.values()), direction)
    expected_grads = torch.autograd.grad(expected, list(leaves.values()), direction.float())
    errors = {"output": relative(out, expected)}
    return errors | {name: relative(a, e) for name, a, e in zip(leaves, actual_grads, expected_grads, strict=True)}


def limits(errors: dict[str, float]) -> dict[str, float]:
    return {name: OUTPUT_TOLERANCE if name == "output" else GRADIENT_TOLERANCE for name in errors}


def assert_contract(errors: dict[str, float]) -> None:
    bad = {name: error for name, error in errors.items() if not error <= limits(errors)[name]}
    assert not bad, f"relative L2 errors over the contract: {bad}"


# --- biases and the clamped activation --------------------------------------------------------------------------------

GPT_OSS = Swiglu(alpha=1.702, limit=7.0, shift=1.0)
# Gates and ups have a variance of 2, so this limit clamps many of them
TIGHT = Swiglu(alpha=1.702, limit=1.7, shift=1.0)


def make_gated(
    hidden: int, intermediate: int, fmt: str, isa: str, threads: int = 1, nodes: int = 1, swiglu: Swiglu = TIGHT
):
    layer = make_layer(hidden, intermediate, fmt, isa, threads, nodes, swiglu=swiglu, biases=True)
    for expert, name in itertools.product(range(EXPERTS), layer.projections):
        layer.load_bias(expert, name, torch.randn(hidden if name == "down_proj" else intermediate))
    return layer


def small_lora(*args, **kwargs) -> ExpertLora:
    """LoRA's inner sums are rounded to bf16. Scaled down, few values cross the limit, where gradients jump."""
    lora = make_lora(*args, **kwargs)
    return replace(lora, pairs={name: replace(pair, scaling=0.02) for name, pair in lora.pairs.items()})


def biases(layer: native.ExpertLayer) -> dict[str, Tensor]:
    return {name: torch.stack([layer.bias(e, name) for e in range(EXPERTS)]) for name in layer.projections}


def gated_oracle(layer: native.ExpertLayer):
    return functools.partial(reference.moe, swiglu=layer.swiglu, biases=biases(layer) if layer.biases else None)


# --- dropout of LoRA --------------------------------------------------------------------------------------------------


def mix64(z: int) -> int:
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


def dropout_mask(lora: ExpertLora, projection: str, route: int, cols: int) -> np.ndarray:
    """Which inputs of a route (token * top_k + slot) are kept: splitmix64 for keys, lowbias32 for each element."""
    stream = mix64((lora.seed + 0x9E3779B97F4A7C15 * (PROJECTIONS.index(projection) + 1)) % 2**64)
    key = mix64((stream + route) % 2**64)
    z = np.arange(cols, dtype=np.uint32) * np.uint32(0x9E3779B9) ^ np.uint32(key % 2**32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        z = (z ^ z >> np.uint32(shift)) * np.uint32(factor)
    return (z ^ np.uint32(key >> 32)) >= np.uint32(np.float32(lora.dropout) * 2.0**32)


def dropout_oracle(
    x: Tensor, index: Tensor, weights: Tensor, gate: Tensor | None, up: Tensor, down: Tensor, lora: ExpertLora
):
    """`reference.moe` with dropout: of SiLU's experts, or of those without a gate."""

    def project(x: Tensor, routes: Tensor, expert: int, name: str, weight: Tensor) -> Tensor:
        if (pair := lora.pairs.get(name)) is None:
            return F.linear(x, weight[expert])
        stays = torch.from_numpy(np.stack([dropout_mask(lora, name, int(route), x.shape[1]) for route in routes]))
        low = F.linear(x * stays / (1 - lora.dropout), pair.a[expert])
        return F.linear(x, weight[expert]) + pair.scaling * F.linear(low, pair.b[expert])

    out = torch.zeros_like(x)
    for expert in index.unique().tolist():
        token, slot = torch.where(index == expert)
        rows, routes = x[token], token * TOP_K + slot
        h = project(rows, routes, expert, "up_proj", up)
        h = F.relu(h) ** 2 if gate is None else F.silu(project(rows, routes, expert, "gate_proj", gate)) * h
        out = out.index_add(0, token, project(h, routes, expert, "down_proj", down) * weights[token, slot, None])
    return out
