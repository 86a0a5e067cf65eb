"""How much memory a model and a training step take: packed experts to the byte, the rest as the code allocates it.

Sizes are bytes. The native core says what its own buffers take (csrc/moe/memory.h). Constants for the allocations of
other libraries were fitted with tests/scripts/plan_accuracy.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ktft import config, native
from ktft.config import PROJECTIONS
from ktft.model.shape import ModelShape, MoeShape

FP32, BF16 = 4, 2
ADAM_STATES = 2  # fp32 moments a parameter
BASELINE = 580 << 20  # Python with torch, transformers, peft and LLaMA-Factory imported: resident code and heap
CUDA_LIBRARIES = 220 << 20  # what a CUDA build of torch adds to it, whether or not a GPU is used
CUDA_CONTEXT = 600 << 20  # of VRAM: driver, kernels, cuBLAS
CUDA_HOST = 1200 << 20  # of RAM: the driver and pinned buffers
VRAM_FRAGMENTS = 1.06  # what torch's caching allocator holds beyond what is used, one block of fp32 logits apart

SPARE_VRAM, SPARE_SHARE = 1 << 30, 0.25  # that `gpu_expert_memory: auto` leaves free: at least, and of what is in use

# Bytes for each logit while the loss is computed and differentiated: bf16 or fp32 logits as the model returns them,
# fp32 ones, log-softmax, its gradient, and the gradient in the logits' dtype.
_LOGIT_BYTES = {BF16: 14, FP32: 16}
# Bytes for each attention score while one layer runs, where torch has no fused attention: on the CPU, when values are
# not as wide as keys (DeepSeek's attention). Scores, mask, softmax and their gradients in fp32; probabilities are kept
# for backward, and fp32 copies of queries, keys and values.
_SCORE_BYTES, _PROBABILITY_BYTES = 29, 4
_DECODED = 2.1  # bytes of a streamed parameter on the GPU: bf16, with LoRA's columns
_RETURNED_BLOCK = 32 << 20  # glibc's largest M_MMAP_THRESHOLD: larger blocks go back to the system when they are freed


@dataclass(frozen=True)
class Adapter:
    """LoRA on `count` matrices of one shape: 1 linear layer, or all experts' same projection in one layer."""

    in_features: int
    out_features: int
    rank: int
    count: int = 1
    layer: int | None = None
    projection: str | None = None  # of routed experts

    @property
    def parameters(self) -> int:
        """The number of parameters of A and B together."""
        return self.count * self.rank * (self.in_features + self.out_features)


@dataclass(frozen=True)
class Workload:
    """One optimizer step of training, as far as memory and time depend on it.

    Attributes:
        adapters: all LoRA.
        batch: sequences of one forward pass; sequence: tokens of each.
        accumulation: forward passes of one optimizer step.
        checkpointing: gradient checkpointing of decoder layers.
        activation: what native layers keep for backward, `retain` or `recompute`.
        placement, gpu_expert_memory: as in `ktft.config.Settings`; of no effect without a GPU.
        states: moments of the optimizer.
        weight_bytes: bytes of a weight outside of the experts.
        mixed: autocast to 16 bits.
        loss_copies: forward passes whose logits live together (2 for DPO's chosen and rejected).
    """

    adapters: tuple[Adapter, ...]
    batch: int
    sequence: int
    accumulation: int = 1
    checkpointing: bool = True
    activation: str = "retain"
    placement: str = "auto"
    gpu_expert_memory: int | str = 0
    states: float = ADAM_STATES
    weight_bytes: int = BF16
    mixed: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of one forward pass."""
        return self.batch * self.sequence

    def expert_activation(self, *, gpu: bool) -> str:
        """What backward finds. Beside a GPU, checkpointing keeps outputs; gate and up are computed again."""
        return "recompute" if gpu and self.checkpointing else self.activation

    def on_experts(self, layer: int | None = None) -> list[Adapter]:
        """LoRA on routed experts, of one layer or of all."""
        return [a for a in self.adapters if a.projection and (layer is None or a.layer == layer)]

    def elsewhere(self) -> list[Adapter]:
        """LoRA on linear layers."""
        return [a for a in self.adapters if not a.projection]

    def training_bytes(self, adapters: Iterable[Adapter]) -> int:
        """Parameters, gradients and the optimizer's moments: fp32, which peft makes LoRA whatever the model's dtype."""
        return int(sum(a.parameters for a in adapters) * FP32 * (2 + self.states))


@dataclass(frozen=True)
class Footprint:
    """Bytes by what they are for: RAM, of which `packed` lies on given NUMA nodes, and VRAM (empty without a GPU)."""

    packed: tuple[int, ...]
    ram: dict[str, int]
    vram: dict[str, int]

    @property
    def ram_bytes(self) -> int:
        """All RAM."""
        return sum(self.ram.values())

    @property
    def vram_bytes(self) -> int:
        """All VRAM."""
        return sum(self.vram.values())

    def with_residents(self, resident: int) -> Footprint:
        """The same footprint with `resident` bytes of experts that stay on the GPU."""
        return replace(self, vram=self.vram | {"resident experts": resident})

    @property
    def node_bytes(self) -> tuple[int, ...]:
        """RAM a node: its slice of the experts and, of what has no node of its own, an equal part."""
        rest = (self.ram_bytes - sum(self.packed)) // len(self.packed)
        return tuple(packed + rest for packed in self.packed)


# --- parts ------------------------------------------------------------------------------------------------------------


def packed_per_node(moes: Iterable[MoeShape], expert_format: str, nodes: int) -> tuple[int, ...]:
    """Bytes of all layers' packed experts on each of `nodes` nodes, exactly as native allocates them."""
    total = [0] * nodes
    for moe in moes:
        dims = moe.num_experts, moe.hidden_size, moe.intermediate_size
        sizes = native.packed_bytes(*dims, expert_format, nodes, moe.biases)
        for node, size in enumerate(sizes):
            total[node] += size
    return tuple(total)


def active_experts(moe: MoeShape, tokens: int) -> float:
    """Experts that get at least one of the tokens when all are equally likely."""
    return moe.num_experts * (1 - (1 - moe.top_k / moe.held.num_experts) ** tokens)


def expert_buffers(
    moe: MoeShape, tokens: int, adapters: Iterable[Adapter], *, threads: int, nodes: int, activation: str
) -> native.LayerMemory:
    """Memory of the native buffers in a forward and a backward of `tokens` tokens, if experts are equally likely."""
    return native.layer_memory(
        moe.hidden_size,
        moe.intermediate_size,
        biases=moe.biases,
        ranks={a.projection: a.rank for a in adapters if a.projection},
        rows=tokens * moe.top_k,
        experts=active_experts(moe, tokens),
        threads=threads,
        nodes=nodes,
        activation=activation,
    )


def _layer_activations(shape: ModelShape, work: Workload) -> float:
    """Bytes a token of what torch keeps of the largest decoder layer, routed experts apart.

    A linear layer's output; with LoRA also its input in the adapter's precision; norms in fp32; attention's operands.
    """
    adapted = {(a.layer, a.in_features, a.out_features) for a in work.elsewhere()}
    wide = BF16 if work.mixed else work.weight_bytes
    layers: dict[int, float] = {}
    for linear in shape.linears:
        if linear.layer is None:
            continue
        lora = (linear.layer, linear.in_features, linear.out_features) in adapted
        size = linear.out_features * wide * (2 if lora else 1)
        if lora:
            size += linear.in_features * (BF16 if work.mixed else FP32)
        layers[linear.layer] = layers.get(linear.layer, 0.0) + size
    attention = shape.heads * (4 * shape.qk_dim + 2 * shape.v_dim) * wide
    norms = shape.hidden_size * (4 * wide + 4 * FP32)
    return max(layers.values(), default=0.0) + attention + norms


def _layer_kept(shape: ModelShape, work: Workload) -> float:
    """Bytes a token that backward finds of the largest decoder layer on a GPU, where LoRA on a linear layer is one node
    and norms are fused: inputs and outputs of linear layers, rotated queries and keys, both residuals and norms.
    """
    adapted = {(a.layer, a.in_features, a.out_features) for a in work.elsewhere()}
    layers: dict[int, int] = {}
    for linear in shape.linears:
        if linear.layer is not None:
            lora = (linear.layer, linear.in_features, linear.out_features) in adapted
            features = linear.out_features + (linear.in_features if lora else 0)
            layers[linear.layer] = layers.get(linear.layer, 0) + features
    return BF16 * (max(layers.values(), default=0) + 2 * shape.heads * shape.qk_dim + 4 * shape.hidden_size)


def torch_activations(shape: ModelShape, work: Workload, *, gpu: bool) -> int:
    """The peak of what torch holds in one forward and backward pass, wherever the model's other weights are."""
    stream = work.tokens * shape.hidden_size * (FP32 if work.mixed else work.weight_bytes)
    layer = work.tokens * _layer_activations(shape, work)
    fused = gpu or shape.qk_dim == shape.v_dim
    every_score = 0 if fused else work.batch * shape.heads * work.sequence**2
    copies = 0 if fused else work.tokens * shape.heads * (2 * shape.qk_dim + shape.v_dim) * FP32
    logits = work.tokens * shape.vocab_size * (_LOGIT_BYTES[work.weight_bytes] + (FP32 if work.mixed else 0))
    if work.checkpointing:
        scores = every_score * _SCORE_BYTES
        layer = 2 * layer + copies
        # blocks that malloc does not return: one layer's are still there when the logits come
        left = 0 if gpu else layer + (scores if every_score * FP32 < _RETURNED_BLOCK else 0)
        return int(shape.layers * stream + max(logits + left, layer + scores))
    if gpu and work.mixed:
        layer = work.tokens * _layer_kept(shape, work)
    kept = layer + copies + every_score * _PROBABILITY_BYTES
    return int(shape.layers * kept + max(logits, every_score * (_SCORE_BYTES - _PROBABILITY_BYTES)))


# --- the whole --------------------------------------------------------------------------------------------------------


def footprint(
    shape: ModelShape, work: Workload | None, expert_format: str, *, threads: int, nodes: int, gpu: bool
) -> Footprint:
    """RAM and VRAM of training, or of holding the model when `work` is None."""
    packed = packed_per_node(shape.moe.values(), expert_format, nodes)
    ram = {"experts": sum(packed), "python": BASELINE + (CUDA_LIBRARIES if gpu or torch.version.cuda else 0)}
    dense = {"other weights": shape.other_parameters * (work.weight_bytes if work else BF16)}
    vram = {"cuda": CUDA_CONTEXT} if gpu else {}
    if gpu:
        ram["cuda"] = CUDA_HOST
    place = vram if gpu else ram
    place |= dense
    if work is None:
        return Footprint(packed, ram, vram)
    ram["expert LoRA"] = sum(a.parameters for a in work.on_experts()) * FP32
    ram["its gradients and moments"] = work.training_bytes(work.on_experts()) - ram["expert LoRA"]
    place["other LoRA, gradients, moments"] = work.training_bytes(work.elsewhere())
    buffers = [
        expert_buffers(
            moe,
            work.tokens,
            work.on_experts(number),
            threads=threads,
            nodes=nodes,
            activation=work.expert_activation(gpu=gpu),
        )
        for number, moe in shape.moe.items()
    ]
    kept = [layer.retained for layer in buffers]
    retained = max(kept) if work.checkpointing else sum(kept)
    largest = max(layer.workspace for layer in buffers)
    io = 6 * work.tokens * shape.hidden_size * FP32  # hidden states, outputs and their gradients as they cross
    layer_grads = [sum(a.parameters for a in work.on_experts(n)) for n in shape.moe]
    second = work.accumulation > 1  # gradients of a further pass stand beside those they are added to
    ram["expert activations"] = retained + largest + io + (max(layer_grads) * FP32 if second else 0)
    place["activations"] = torch_activations(shape, work, gpu=gpu)
    if gpu:
        held = sum(vram.values()) - CUDA_CONTEXT
        vram["fragments"] = int(held * (VRAM_FRAGMENTS - 1)) + work.tokens * shape.vocab_size * FP32
        vram |= lane_bytes(shape, work, sum(packed))
    return Footprint(packed, ram, vram)


LANE_PARTS = ("expert lanes", "resident experts", "expert outputs")


def lane_bytes(shape: ModelShape, work: Workload, packed_bytes: int) -> dict[str, int]:
    """VRAM that the experts take: buffers of those streamed, those that stay there (`auto`: none yet), and under
    checkpointing every layer's output, so that recomputing a layer does not run its experts again.
    """
    outputs = len(shape.moe) * work.tokens * shape.hidden_size * BF16
    sizes = (
        0 if work.placement == "cpu" else _lane_buffers(shape, work, packed_bytes / shape.expert_parameters),
        resident_bytes(work.gpu_expert_memory, packed_bytes, free=0, used=0),
        outputs if work.checkpointing else 0,
    )
    return dict(zip(LANE_PARTS, sizes, strict=True))


def _lane_buffers(shape: ModelShape, work: Workload, packed: float) -> int:
    """As `ktft.lanes.gpu.buffers` sizes them: for half of a layer's experts, twice as they are packed, `packed` bytes a
    parameter, once more for residents, twice their LoRA, and decoded once.
    """
    times = 3 if work.gpu_expert_memory else 2

    def half(number: int, moe: MoeShape) -> int:
        lora = sum(a.parameters for a in work.on_experts(number)) * FP32
        return int(moe.parameters * (times * packed + _DECODED) + 2 * lora) // 2

    return min(config.LANE_BYTES, max(half(number, moe) for number, moe in shape.moe.items()))


def resident_bytes(wished: int | str, packed_bytes: int, free: int, used: int) -> int:
    """VRAM for resident experts: what `gpu_expert_memory` says; with `auto`, what is free beside all else that is used,
    less what longer batches may need.
    """
    size = free - max(SPARE_VRAM, int(used * SPARE_SHARE)) if isinstance(wished, str) else wished
    return min(max(size, 0), packed_bytes)


def expert_adapters(moe: dict[int, MoeShape], ranks: dict[int, dict[str, int]]) -> list[Adapter]:
    """LoRA on routed experts from layer -> projection -> rank."""
    return [
        Adapter(
            *moe[layer].projection(name),
            rank=ranks[layer][name],
            count=moe[layer].num_experts,
            layer=layer,
            projection=name,
        )
        for layer in moe
        for name in PROJECTIONS
        if name in ranks.get(layer, {})
    ]
