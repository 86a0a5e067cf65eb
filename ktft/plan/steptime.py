"""Seconds of a training step and of loading, from rates. Estimates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ktft import native
from ktft.lanes.decide.costs import LayerKind
from ktft.lanes.decide.simulate import Hardware, Simulated, joined, simulate
from ktft.model.memory import BF16, FP32, Workload, active_experts
from ktft.model.shape import ModelShape
from ktft.plan.description import LINK_RATE, Machine
from ktft.plan.rates import ExpertRate, LayerRate, OtherRates, TorchRate, expert_flops
from ktft.plan.source import ModelSource

# Of the GPU's FLOP/s that layers of a transformer reach in practice.
GPU_SHARE = 0.5
# Python and kernel launches of one decoder layer: forward, and backward.
LAYER_SECONDS = (0.0015, 0.0025)
STEP_SECONDS = 0.01  # Trainer and data loader
ATTENTION_SHARE = 0.3  # of the linear layers' rate that attention's products reach
# Bytes an optimizer step moves for each fp32 LoRA parameter: gradient norm 4, clipping 8, Adam 28; and backward writes
# and adds gradients, 8.
OPTIMIZER_BYTES = 48
LINK_SECONDS = 0.0003  # a collective call between ranks, whatever its size
LOAD_MARGIN = 1.15  # over the slower of reading and packing


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by what takes them."""

    experts: float
    other: float
    optimizer: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.experts + self.other + self.optimizer


def step_time(
    shape: ModelShape, work: Workload, machine: Machine, rate: ExpertRate, others: OtherRates, packed_bytes: int,
    lanes: Simulated | None,
) -> StepTime:  # fmt: skip
    """One optimizer step: `work.accumulation` forward and backward passes, and the optimizer. `lanes`: the experts of
    one pass beside a GPU.
    """
    passes = work.accumulation
    return StepTime(
        experts=passes * (lanes.total if lanes else _experts(shape, work, machine, rate, packed_bytes)),
        other=passes * (_other(shape, work, machine, others) + exchange_seconds(shape, work, machine)) + STEP_SECONDS,
        optimizer=sum(a.parameters for a in work.on_experts()) * OPTIMIZER_BYTES / machine.bandwidth
        + (0 if machine.gpu else sum(a.parameters for a in work.elsewhere()) * OPTIMIZER_BYTES / machine.bandwidth),
    )


def exchange_seconds(shape: ModelShape, work: Workload, machine: Machine) -> float:
    """What ranks send each other in one forward and backward pass: hidden states to the experts, sums back, and their
    gradients. Checkpointing sends them forward twice. Tokens of other machines cross the network once for all GPUs.
    """
    if work.ranks == 1:
        return 0.0
    one = work.tokens * shape.hidden_size * BF16
    near = (machine.local_ranks - 1) * one / LINK_RATE
    far = (work.ranks - machine.local_ranks) * one / machine.network_rate
    times = 2 * (2 if work.checkpointing else 1) + 2
    return len(shape.moe) * times * (near + far + LINK_SECONDS)


def simulated_lanes(
    shape: ModelShape, work: Workload, machine: Machine, rate: ExpertRate, expert_format: str, resident: int,
    routing: str,
) -> Simulated:  # fmt: skip
    """The experts of one pass of a batch, on a machine whose GPU holds `resident` bytes of them."""
    gpu, kinds = machine.gpu, Counter[LayerKind]()
    assert gpu is not None
    for number, moe in shape.moe.items():
        dims = moe.num_experts, moe.hidden_size, moe.intermediate_size
        expert_bytes = sum(native.packed_bytes(*dims, expert_format, machine.nodes, moe.biases)) // moe.num_experts
        lora = sum(a.parameters for a in work.on_experts(number)) // moe.num_experts
        top_k = max(round(moe.top_k * moe.held.share), 1)  # routes of a token that end here
        kinds[LayerKind(moe.num_experts, top_k, *dims[1:], expert_bytes, lora)] += 1
    retained = work.expert_activation(gpu=True) == "retain"
    again = 0.0 if retained or machine.measured else 2 / 3
    hardware = Hardware(
        cpu_forward=rate.forward,
        cpu_backward=1 / (1 / rate.backward + again / rate.forward),
        cpu_bandwidth=machine.bandwidth,
        pcie=gpu.pcie_rate,
        gpu_flops=gpu.flops,
        gpu_bandwidth=gpu.bandwidth,
    )
    every = sum(kind.expert_bytes * layers for kind, layers in kinds.items())  # of one expert a layer
    return joined(
        simulate(
            kind,
            hardware.rates(kind, retained=retained),
            work.expert_tokens,
            layers=layers,
            mode=work.placement,
            residents=resident // every,
            routing=routing,
            retained=retained,
        )
        for kind, layers in kinds.items()
    )


def _experts(shape: ModelShape, work: Workload, machine: Machine, rate: ExpertRate, packed_bytes: int) -> float:
    total = 0.0
    forwards = 2 if work.checkpointing else 1
    for moe in shape.moe.values():
        flops = expert_flops(moe, work.expert_tokens)
        used = active_experts(moe, work.expert_tokens) / moe.num_experts
        reading = packed_bytes * moe.parameters / shape.expert_parameters * used / machine.bandwidth
        again = 2 / 3 if work.activation == "recompute" and not machine.measured else 0.0
        total += forwards * max(flops / rate.forward, reading)
        total += max(flops / rate.backward + again * flops / rate.forward, reading)
    return total


def _other(shape: ModelShape, work: Workload, machine: Machine, rates: OtherRates) -> float:
    """Decoder layers without their routed experts, and what is around them."""
    forwards = 2 if work.checkpointing else 1
    layers = rates.layers or _layers(shape, work, machine, rates.torch)
    return forwards * layers.forward + layers.backward + _around(shape, work, machine, rates.torch)


def _layers(shape: ModelShape, work: Workload, machine: Machine, rate: TorchRate) -> LayerRate:
    """Attention, shared experts, dense layers, and LoRA on them."""
    tokens, gpu = work.tokens, machine.gpu
    inside = sum(linear.in_features * linear.out_features for linear in shape.linears if linear.layer is not None)
    attention = shape.layers * work.sequence * shape.heads * (shape.qk_dim + shape.v_dim) / 2 / ATTENTION_SHARE
    flops = gpu.flops * GPU_SHARE if gpu else rate.forward, gpu.flops * GPU_SHARE if gpu else rate.backward
    forward = shape.layers * LAYER_SECONDS[0] + 2.0 * tokens * (inside + attention) / flops[0]
    backward = shape.layers * LAYER_SECONDS[1] + 2.0 * tokens * (inside + 2 * attention) / flops[1]
    if gpu:
        adapters = sum(a.in_features * a.out_features for a in work.elsewhere()) * 2 / gpu.bandwidth
        return LayerRate(forward + adapters, backward + adapters)
    features = sum(a.in_features + a.out_features for a in work.elsewhere())
    elementwise = shape.layers * shape.hidden_size * 20 * FP32 / machine.bandwidth  # norms, residuals, activations
    extra = tokens * (features * rate.lora / 2 + elementwise)
    return LayerRate(forward + extra, backward + extra)


def _around(shape: ModelShape, work: Workload, machine: Machine, rate: TorchRate) -> float:
    """The output layer and the loss, forward and backward."""
    outside = sum(linear.in_features * linear.out_features for linear in shape.linears if linear.layer is None)
    logits = work.tokens * shape.vocab_size
    if gpu := machine.gpu:
        return 4.0 * work.tokens * outside / (gpu.flops * GPU_SHARE) + logits * 40 / gpu.bandwidth
    return 2.0 * work.tokens * outside * (1 / rate.forward + 1 / rate.backward) + logits * rate.logit


def load_seconds(source: ModelSource, machine: Machine, rate: ExpertRate) -> float:
    """Reading the checkpoint and, unless that was done already, packing the experts, which go on together."""
    reading = source.expert_bytes / machine.disk_rate
    packing = 0.0 if source.expert_format else 2 * source.shape.expert_parameters / rate.pack
    return max(reading, packing) * LOAD_MARGIN + source.other_bytes / machine.disk_rate
