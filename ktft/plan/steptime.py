"""Seconds of a training step and of loading, from rates. Estimates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ktft import native
from ktft.lanes.decide.costs import LayerKind
from ktft.lanes.decide.simulate import Around, Hardware, Simulated, joined, simulate
from ktft.lanes.terms import PASSES, Work
from ktft.model.dense_memory import DenseMemory, dense_memory
from ktft.model.memory import active_experts, lane_chunk, loss_chunks
from ktft.model.shape import ModelShape
from ktft.model.workload import BF16, FP32, Workload
from ktft.plan.description import LINK_RATE, Machine
from ktft.plan.rates import ExpertRate, LayerRate, OtherRates, TorchRate, expert_flops
from ktft.plan.source import ModelSource

# Of the GPU's FLOP/s that layers of a transformer reach in practice.
GPU_SHARE = 0.5
# Python and kernel launches of one decoder layer without its experts, forward and backward: the least that it takes.
LAYER_SECONDS = (0.002, 0.0035)
# Where the layer is recorded, what its many small kernels take beside its products, however few the tokens.
RECORDED_SECONDS = (0.0006, 0.0012)
# Python and kernel launches of a layer's experts, in several lanes, and where they are recorded: all on the GPU.
EXPERTS_SECONDS = (0.003, 0.003)
STEADY_SECONDS = (0.0006, 0.0012)
# Of the GPU's memory rate, the rate at which packed weights are decoded, counted in bytes of bf16: 1.5 of 4.8 TB/s.
DECODE_SHARE = 0.31
HEAD_DECODES = (
    3  # of the output layer for a part of the logits: for the loss, and for its gradient forward and backward
)
STEP_SECONDS = 0.01  # Trainer and data loader
ATTENTION_SHARES = {"cpu": 0.3, "gpu": 0.7}  # of the linear layers' rate that attention's products reach
# Bytes of GPU memory that go by for each score of attention that is not fused, forward and backward.
SCORE_TRAFFIC = (60, 120)
# An optimizer step moves 40 bytes for each fp32 LoRA parameter: gradient norm 4, clipping 8, Adam 28. It takes as long
# as reading this many, because the memory reads and writes at once.
OPTIMIZER_BYTES = 36
LINK_SECONDS = 0.0003  # a collective call between ranks, whatever its size
LOAD_MARGIN = 1.15  # over the slower of reading and packing


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, by what takes them. Of an optimizer that goes on behind the next step's forward
    only what is left after that counts.

    Attributes:
        decoding: of `other`, what decoding the weights outside the experts takes.
        copying: the copies of these weights to the GPU, which go on beside other work.
    """

    experts: float
    other: float
    optimizer: float
    decoding: float = 0.0
    copying: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.experts + self.other + self.optimizer


def step_time(
    shape: ModelShape, work: Workload, machine: Machine, rate: ExpertRate, others: OtherRates, packed_bytes: int,
    lanes: Simulated | None,
) -> StepTime:  # fmt: skip
    """One optimizer step: `work.accumulation` forward and backward passes, and the optimizer. `lanes`: what the experts
    add to one pass of the micro-batches that go together, beside a GPU.
    """
    passes, between, dense = work.accumulation, _between(shape, work, machine, others), _dense(shape, work)
    head = dense.head * HEAD_DECODES * loss_chunks(shape, work)
    around = _around(shape, work, machine, others.torch) + _decode_seconds(head, machine)
    trained = work.on_experts() if machine.gpu else work.adapters
    optimizer = sum(a.parameters for a in trained) * OPTIMIZER_BYTES / machine.bandwidth
    if lanes and work.deferred and work.ranks == 1:
        optimizer = max(optimizer - lanes.forward - work.group * between[Work.FORWARD], 0.0)
    return StepTime(
        experts=work.groups * (lanes.total if lanes else _experts(shape, work, machine, rate, packed_bytes)),
        other=passes * (sum(between.values()) + around) + STEP_SECONDS,
        optimizer=optimizer,
        decoding=passes * _decode_seconds(dense.decoded * (2 + _again(work)) + head, machine),
        copying=work.groups * len(PASSES) * _crossing_seconds(shape, work, machine),
    )


def _again(work: Workload) -> float:
    """The share of layers that are run again for their backward."""
    return 1 - work.stored if work.checkpointing else 0.0


def _dense(shape: ModelShape, work: Workload) -> DenseMemory:
    return dense_memory(shape, work.dense, work.weight_bytes, recorded=work.recorded)


def _decode_seconds(decoded: float, machine: Machine) -> float:
    """Decoding packed weights outside the experts that are so many bytes then."""
    return decoded / (machine.gpu.bandwidth * DECODE_SHARE) if machine.gpu else 0.0


def _crossing_seconds(shape: ModelShape, work: Workload, machine: Machine) -> float:
    """Copying the weights outside the experts to the GPU, once for a pass of the micro-batches that go together."""
    return _dense(shape, work).crossing / machine.gpu.pcie_rate if machine.gpu else 0.0


def _between(shape: ModelShape, work: Workload, machine: Machine, rates: OtherRates) -> dict[Work, float]:
    """Seconds of each pass through all decoder layers without their routed experts; checkpointing's second forward is
    backward's.
    """
    layers = rates.layers or _layers(shape, work, machine, rates.torch)
    added, again = 2 * exchange_seconds(shape, work, machine), _again(work)
    added += _decode_seconds(_dense(shape, work).decoded, machine)
    return {
        Work.FORWARD: layers.forward + added,
        Work.BACKWARD: layers.backward + added + again * (layers.forward + added),
    }


def exchange_seconds(shape: ModelShape, work: Workload, machine: Machine) -> float:
    """What ranks send each other once in every layer: hidden states to the experts, their sums back, or gradients of
    either. Tokens of other machines cross the network once for all GPUs.
    """
    if work.ranks == 1:
        return 0.0
    one = work.tokens * shape.hidden_size * BF16
    near = (machine.local_ranks - 1) * one / LINK_RATE
    far = (work.ranks - machine.local_ranks) * one / machine.network_rate
    return len(shape.moe) * (near + far + LINK_SECONDS)


def simulated_lanes(
    shape: ModelShape, work: Workload, machine: Machine, rate: ExpertRate, others: OtherRates, expert_format: str,
    resident: int, routing: str,
) -> Simulated:  # fmt: skip
    """What the experts add to one pass of the micro-batches that go together, on a machine whose GPU holds `resident`
    bytes of them.
    """
    gpu, kinds = machine.gpu, Counter[tuple[LayerKind, int]]()
    assert gpu is not None
    for number, moe in shape.moe.items():
        dims = moe.num_experts, moe.hidden_size, moe.intermediate_size
        packed = sum(native.packed_bytes(*dims, expert_format, machine.nodes, moe.biases, moe.gated))
        lora = work.on_experts(number).spread
        top_k = max(round(moe.top_k * moe.held.share), 1)  # routes of a token that end here
        each = packed // moe.num_experts, lora // moe.num_experts
        experts, _ = lane_chunk(moe, lora, packed / moe.parameters, residents=resident > 0)
        kinds[LayerKind(moe.num_experts, top_k, *dims[1:], *each, len(moe.projections)), 2 * experts] += 1
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
    every = sum(kind.expert_bytes * layers for (kind, _), layers in kinds.items())  # of one expert a layer
    between = {
        each: work.group * seconds / shape.layers for each, seconds in _between(shape, work, machine, others).items()
    }
    launches = dict(zip(PASSES, EXPERTS_SECONDS, strict=True))
    steady = dict(zip(PASSES, STEADY_SECONDS if work.recorded else EXPERTS_SECONDS, strict=True))
    crossing = _crossing_seconds(shape, work, machine) / shape.layers
    waiting = work.group * work.tokens * shape.hidden_size * (work.weight_bytes + BF16) if work.away else 0
    beside = {Work.FORWARD: crossing, Work.BACKWARD: crossing + waiting / gpu.pcie_rate}
    return joined(
        simulate(
            kind,
            hardware.rates(kind, retained=retained),
            round(work.group * work.expert_tokens),
            layers=layers,
            mode=work.placement,
            residents=resident // every,
            routing=routing,
            retained=retained,
            around=Around(between, launches, steady, beside, ahead),
        )
        for (kind, ahead), layers in kinds.items()
    )


def _experts(shape: ModelShape, work: Workload, machine: Machine, rate: ExpertRate, packed_bytes: int) -> float:
    total, tokens = 0.0, round(work.group * work.expert_tokens)
    forwards = 2 if work.checkpointing else 1
    for moe in shape.moe.values():
        flops = expert_flops(moe, tokens)
        used = active_experts(moe, tokens) / moe.num_experts
        reading = packed_bytes * moe.parameters / shape.expert_parameters * used / machine.bandwidth
        again = 2 / 3 if work.activation == "recompute" and not machine.measured else 0.0
        total += forwards * max(flops / rate.forward, reading)
        total += max(flops / rate.backward + again * flops / rate.forward, reading)
    return total


def _layers(shape: ModelShape, work: Workload, machine: Machine, rate: TorchRate) -> LayerRate:
    """Attention, shared experts, dense layers, and LoRA on them."""
    tokens, gpu = work.tokens, machine.gpu
    inside = sum(linear.parameters for linear in shape.linears if linear.layer is not None)
    share = ATTENTION_SHARES["gpu" if gpu else "cpu"]
    attention = shape.layers * work.sequence * shape.heads * (shape.qk_dim + shape.v_dim) / 2 / share
    flops = gpu.flops * GPU_SHARE if gpu else rate.forward, gpu.flops * GPU_SHARE if gpu else rate.backward
    forward, backward = (2.0 * tokens * (inside + each * attention) / flops[each - 1] for each in (1, 2))
    if gpu:
        adapters = sum(a.in_features * a.out_features for a in work.elsewhere()) * 2 / gpu.bandwidth
        scores = shape.layers * work.batch * shape.heads * work.sequence**2 / gpu.bandwidth if shape.eager else 0.0
        forward, backward = (
            each + adapters + scores * traffic for each, traffic in zip((forward, backward), SCORE_TRAFFIC, strict=True)
        )
        if work.recorded:
            first, second = (shape.layers * each for each in RECORDED_SECONDS)
            return LayerRate(first + forward, second + backward)
        first, second = (shape.layers * each for each in LAYER_SECONDS)
        return LayerRate(max(first, forward), max(second, backward))  # the host starts work that the GPU does later
    launches = [shape.layers * each for each in LAYER_SECONDS]
    forward, backward = forward + launches[0], backward + launches[1]
    features = sum(a.in_features + a.out_features for a in work.elsewhere())
    elementwise = shape.layers * shape.hidden_size * 20 * FP32 / machine.bandwidth  # norms, residuals, activations
    extra = tokens * (features * rate.lora / 2 + elementwise)
    return LayerRate(forward + extra, backward + extra)


def _around(shape: ModelShape, work: Workload, machine: Machine, rate: TorchRate) -> float:
    """The output layer and the loss, forward and backward."""
    outside = sum(linear.parameters for linear in shape.linears if linear.layer is None)
    logits = work.tokens * shape.vocab_size
    if gpu := machine.gpu:
        return 4.0 * work.tokens * outside / (gpu.flops * GPU_SHARE) + logits * 40 / gpu.bandwidth
    return 2.0 * work.tokens * outside * (1 / rate.forward + 1 / rate.backward) + logits * rate.logit


def load_seconds(source: ModelSource, machine: Machine, rate: ExpertRate) -> float:
    """Reading the checkpoint and, unless that was done already, packing the experts, which go on together."""
    reading = source.expert_bytes / machine.disk_rate
    packing = 0.0 if source.expert_format else 2 * source.shape.expert_parameters / rate.pack
    return max(reading, packing) * LOAD_MARGIN + source.other_bytes / machine.disk_rate
