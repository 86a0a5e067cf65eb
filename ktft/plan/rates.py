"""The speed of the kernels and of torch on given shapes: timed on this machine, or derived from published figures."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ktft import native
from ktft.formats import FORMAT_TRAITS
from ktft.lora import ExpertLora, LoraPair
from ktft.model.memory import active_experts
from ktft.model.shape import ModelShape, MoeShape
from ktft.model.workload import Adapter, Workload
from ktft.plan.description import Machine
from ktft.swiglu import RELU2, SILU

# The shares of P that forward and backward reach, from docs/dev/kernel-log.md. AMX with int8 reaches 42 and 36% at the
# deepseek-v3 shape, and 32 and 24% at the qwen3-30b-a3b shape, whose experts are small. AVX-512-BF16 reaches H over P
# times the share of H (70 and 64%); the other vector ISAs use these values too.
SHARES = {"large": (0.42, 0.36), "small": (0.32, 0.24), "vector": (0.70, 0.64)}
SMALL_INTERMEDIATE = 1024
# The relative cost of LoRA in forward and backward at rank 8, which SHARES include; docs/dev/kernel-log.md.
LORA_COST = (0.10, 0.15)
DENSE_SHARE = 0.5  # share of P that torch's bf16 products reach: 56% with oneDNN, docs/dev/kernel-log.md
FP32_SLOWDOWN = {"amx_bf16": 16.0, "avx512_bf16": 2.0}  # time of fp32 products relative to bf16 ones; 1 on other ISAs
PACK_RATE = 0.4e9  # bytes/s of bf16 that one thread quantizes and packs

_LARGEST_LAYER = 128_000_000  # parameters of the timed layer, at most, unless two experts have more
_SECONDS = 0.15  # approximate duration of one timed pass
_LONGEST = 4.0  # seconds of one pass over work that cannot be counted in advance; a pass runs some ten times


@dataclass(frozen=True)
class ExpertRate:
    """FLOP/s of base products, whose time includes LoRA and all other work of a pass; and bytes/s of bf16 packed."""

    forward: float
    backward: float
    pack: float

    def shared(self, processes: int) -> ExpertRate:
        """The rate of one of several processes that share the cores."""
        return ExpertRate(self.forward / processes, self.backward / processes, self.pack / processes)


@dataclass(frozen=True)
class TorchRate:
    """The rates of torch outside the experts, on the CPU.

    Attributes:
        forward, backward: FLOP/s of products.
        lora: seconds of LoRA per token and feature of a layer, counting input and output features.
        logit: seconds of the loss per logit.
    """

    forward: float
    backward: float
    lora: float
    logit: float


@dataclass(frozen=True)
class LayerRate:
    """Seconds that all decoder layers, without their routed experts, take for forward and backward of one batch.

    `shortened` is the length of the sequences that were timed if those of the recipe would have taken too long.
    """

    forward: float
    backward: float
    shortened: int | None = None


@dataclass(frozen=True)
class OtherRates:
    """The rates outside the experts: those of torch, and the timed layers' seconds, None if they were not timed."""

    torch: TorchRate
    layers: LayerRate | None


def expert_flops(moe: MoeShape, tokens: int) -> float:
    """FLOPs of the base products in one pass."""
    return 2.0 * len(moe.projections) * tokens * moe.top_k * moe.held.share * moe.hidden_size * moe.intermediate_size


# --- from tables ------------------------------------------------------------------------------------------------------


def published_expert_rate(
    machine: Machine, moe: MoeShape, expert_format: str, adapters: Sequence[Adapter]
) -> ExpertRate:
    """The experts' rate on a machine that is only described, from published figures."""
    size = "small" if moe.intermediate_size < SMALL_INTERMEDIATE else "large"
    shares = SHARES[size if machine.isa == "amx_bf16" else "vector"]
    rank = max((a.rank for a in adapters), default=0)
    costs = [(1 + cost * -(-rank // 16)) / (1 + cost) for cost in LORA_COST]
    speed = FORMAT_TRAITS[expert_format].speed
    forward, backward = (machine.flops * share * speed / cost for share, cost in zip(shares, costs, strict=True))
    return ExpertRate(forward, backward, PACK_RATE * machine.threads)


def published_torch_rate(machine: Machine, work: Workload) -> TorchRate:
    """The rates of torch on a machine that is only described, from published figures."""
    products = machine.flops * DENSE_SHARE
    slow = FP32_SLOWDOWN.get(machine.isa, 1.0)
    rank = max((a.rank for a in work.elsewhere()), default=0)
    copies = 24 / machine.bandwidth  # casts of inputs and sums of outputs, forward and backward
    return TorchRate(products, products, 6 * rank * slow / products + copies, 40 / machine.bandwidth)


# --- timed here -------------------------------------------------------------------------------------------------------


def timed_expert_rate(
    runtime: native.Runtime, machine: Machine, moe: MoeShape, expert_format: str, tokens: int,
    adapters: Sequence[Adapter], activation: str,
) -> ExpertRate:  # fmt: skip
    """Time a layer with as many of these experts as is quick, and as many rows per expert as in training."""
    matrix, each = moe.hidden_size * moe.intermediate_size, len(moe.projections)
    experts = max(min(moe.num_experts, _LARGEST_LAYER // (each * matrix)), 2)
    per_expert = tokens * moe.top_k / active_experts(moe, tokens)
    most = machine.flops * 0.25 * _SECONDS / (2.0 * each * experts * matrix)
    rows = max(round(min(per_expert, most)), 1)
    layer = native.ExpertLayer(
        runtime,
        num_experts=experts,
        hidden_size=moe.hidden_size,
        intermediate_size=moe.intermediate_size,
        format=expert_format,
        swiglu=SILU if moe.gated else RELU2,
    )
    start = time.perf_counter()
    for name in moe.projections:
        inputs, outputs = moe.projection(name)
        weight = torch.randn(outputs, inputs).to(torch.bfloat16)
        for expert in range(experts):
            layer.load(expert, name, weight)
    packing = time.perf_counter() - start
    top_k = min(moe.top_k, experts)
    count = max(experts * rows // top_k, 1)
    index = (torch.arange(count)[:, None] * top_k + torch.arange(top_k)) % experts
    x = torch.randn(count, moe.hidden_size).to(torch.bfloat16)
    weights = torch.full((count, top_k), 1 / top_k)
    lora = _lora(moe, experts, adapters)

    def once() -> tuple[float, float]:
        begin = time.perf_counter()
        _, saved = layer.forward(x, index, weights, lora, activation)
        middle = time.perf_counter()
        layer.backward(saved, x, x, index, weights, lora)
        return middle - begin, time.perf_counter() - middle

    flops = 2.0 * each * count * top_k * matrix
    forward, backward = (flops / seconds for seconds in medians(once))
    return ExpertRate(forward, backward, 2 * each * experts * matrix / packing)


def _lora(moe: MoeShape, experts: int, adapters: Sequence[Adapter]) -> ExpertLora | None:
    pairs = {
        a.projection: LoraPair(
            torch.randn(experts, a.rank, a.in_features), torch.zeros(experts, a.out_features, a.rank), 1.0
        )
        for a in adapters
        if a.projection
    }
    return ExpertLora(pairs) if pairs else None


def timed_torch_rate(shape: ModelShape, work: Workload) -> TorchRate:
    """Time a linear layer with and without LoRA, and the loss, on the CPU."""
    size, tokens = shape.hidden_size, min(work.tokens, 1024)  # fewer where bf16 is slow
    rank = max((a.rank for a in work.elsewhere()), default=0)
    dtype = torch.bfloat16 if work.mixed or work.weight_bytes == 2 else torch.float32
    weight = torch.randn(size, size).to(dtype)
    inputs = torch.randn(tokens, size).to(dtype)
    a, b = torch.randn(max(rank, 1), size).requires_grad_(), torch.zeros(size, max(rank, 1)).requires_grad_()

    def linear(with_lora: bool, count: int) -> tuple[float, float]:
        x = inputs[:count].requires_grad_()
        begin = time.perf_counter()
        y = F.linear(x, weight)
        if with_lora:
            y = (y + F.linear(F.linear(x.float(), a), b) * 2.0).to(dtype)
        middle = time.perf_counter()
        y.backward(y)
        return middle - begin, time.perf_counter() - middle

    tokens = affordable(sizes_up_to(tokens), lambda count: sum(linear(True, count)))
    plain, adapted = medians(lambda: linear(False, tokens)), medians(lambda: linear(True, tokens))
    rows = max(min(tokens, 1 << 24) * 1024 // shape.vocab_size, 16)
    logits = torch.randn(rows, shape.vocab_size).to(dtype).requires_grad_()
    labels = torch.zeros(rows, dtype=torch.long)

    def loss() -> tuple[float, float]:
        begin = time.perf_counter()
        F.cross_entropy(logits.float(), labels).backward()
        return time.perf_counter() - begin, 0.0

    flops = 2.0 * tokens * size * size
    extra = max(sum(adapted) - sum(plain), 0.0) if rank else 0.0
    return TorchRate(
        flops / plain[0], flops / plain[1], extra / (tokens * 2 * size), medians(loss)[0] / (rows * shape.vocab_size)
    )


def medians(once: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    """The medians of both times that `once` measures, over three calls that follow one that does not count."""
    once()
    times = [once() for _ in range(3)]
    return statistics.median(t[0] for t in times), statistics.median(t[1] for t in times)


def sizes_up_to(most: int) -> list[int]:
    """Numbers of tokens to try one after another: 16, 64, 256 and so on, and `most` itself."""
    sizes, size = [], 16
    while size < most:
        sizes.append(size)
        size *= 4
    return [*sizes, most]


def affordable(sizes: Iterable[int], seconds: Callable[[int], float]) -> int:
    """The largest of these rising sizes that is expected to take at most `_LONGEST` seconds; the first in any case.

    Torch computes in bf16 a hundred times slower on a CPU without instructions for it, and then a planned step can take
    an hour: its time follows from that of fewer tokens. A slow pass is repeated, since the first one of all sets up.
    """
    rising = iter(sizes)
    size = next(rising)
    for larger in rising:
        if all(seconds(size) * larger / size > _LONGEST for _ in range(2)):
            break
        size = larger
    return size
