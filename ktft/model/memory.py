"""Estimates the memory of a model and a training step.

Sizes are in bytes. Those of packed experts are exact; the others follow the allocations in the code. The native core
reports the size of its own buffers (csrc/moe/memory.h). The constants for the allocations of other libraries were
fitted with tests/scripts/plan_accuracy.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ktft import config, native
from ktft.lanes.gpu.buffers import ADAPTER_BUFFERS, chunking
from ktft.lanes.gpu.call_memory import call_bytes
from ktft.lanes.gpu.lane import CHUNK_BYTES
from ktft.lanes.gpu.rings import LEAST_BUFFERS
from ktft.lanes.gpu.steady import EMPTY_PIECES, SIZES_BYTES, empty_pieces
from ktft.model import lazy_logits
from ktft.model.dense_memory import PLAIN_ON_GPU, DenseChoice, dense_memory
from ktft.model.shape import ModelShape, MoeShape
from ktft.model.workload import BF16, FP32, Adapter, PlannedAdapters, Workload

BASELINE = 580 << 20  # Python with torch, transformers, peft and LLaMA-Factory imported: resident code and heap
CUDA_LIBRARIES = 220 << 20  # added to BASELINE by a CUDA build of torch, whether or not a GPU is used
CUDA_CONTEXT = 600 << 20  # VRAM of the driver, kernels and cuBLAS
CUDA_HOST = 1200 << 20  # RAM of the driver and pinned buffers
VRAM_FRAGMENTS = 0.06  # VRAM that torch's caching allocator reserves beside each byte of activations
COLLECTIVES = 700 << 20  # RAM of NCCL and gloo in each of several processes that have a GPU

# VRAM that `gpu_expert_memory: auto` leaves free: the minimum in bytes, and the share of the VRAM in use.
SPARE_VRAM, SPARE_SHARE = 1 << 30, 0.25

# Bytes per logit while the loss is computed and differentiated: the bf16 or fp32 logits that the model returns, their
# fp32 copy, log-softmax, its gradient, and the gradient in the logits' dtype. On a GPU three fp32 blocks are alive at
# once, and the others are freed before backward; the allocator keeps the block of the model's own dtype, and one more.
_LOGIT_BYTES, _GPU_LOGIT_BYTES = {BF16: 14, FP32: 16}, 12
# Bytes per attention score while one layer runs without fused attention, which torch lacks on the CPU when values are
# not as wide as keys (DeepSeek's attention): scores, mask, softmax and their gradients, all fp32. Backward keeps the
# probabilities, and fp32 copies of queries, keys and values.
_SCORE_BYTES, _PROBABILITY_BYTES = 29, 4
# The same on a GPU, where only models without another attention compute scores, in bf16.
_GPU_SCORE_BYTES = 18
_LAYER_WORK = 1.5  # the most bytes of a layer at work on a GPU, for each that backward keeps of it
_DECODED = 2.1  # bytes per streamed parameter on the GPU: bf16, with LoRA's columns
_RETURNED_BLOCK = 32 << 20  # glibc's largest M_MMAP_THRESHOLD; larger blocks return to the system when freed


@dataclass(frozen=True)
class Footprint:
    """Bytes of RAM and VRAM by purpose; VRAM is empty without a GPU."""

    packed: tuple[int, ...]  # packed experts, which are part of the RAM, on each NUMA node
    ram: dict[str, int]
    vram: dict[str, int]

    @property
    def ram_bytes(self) -> int:
        return sum(self.ram.values())

    @property
    def vram_bytes(self) -> int:
        return sum(self.vram.values())

    @property
    def node_bytes(self) -> tuple[int, ...]:
        """Bytes of RAM on each node: its slice of the experts, and an equal share of what is bound to no node."""
        rest = (self.ram_bytes - sum(self.packed)) // len(self.packed)
        return tuple(packed + rest for packed in self.packed)


# --- parts ------------------------------------------------------------------------------------------------------------


def packed_per_node(moes: Iterable[MoeShape], expert_format: str, nodes: int) -> tuple[int, ...]:
    """Bytes of all layers' packed experts on each of `nodes` nodes, exactly as the native core allocates them."""
    total = [0] * nodes
    for moe in moes:
        dims = moe.num_experts, moe.hidden_size, moe.intermediate_size
        sizes = native.packed_bytes(*dims, expert_format, nodes, moe.biases, moe.gated)
        for node, size in enumerate(sizes):
            total[node] += size
    return tuple(total)


def active_experts(moe: MoeShape, tokens: int) -> float:
    """The expected number of experts that get at least one token if all experts are equally likely."""
    return moe.num_experts * (1 - (1 - moe.top_k / moe.held.num_experts) ** tokens)


def expert_buffers(
    moe: MoeShape, tokens: int, adapters: Iterable[Adapter], *, threads: int, nodes: int, activation: str
) -> native.LayerMemory:
    """Memory of the native buffers in forward and backward of `tokens` tokens if all experts are equally likely."""
    return native.layer_memory(
        moe.hidden_size,
        moe.intermediate_size,
        biases=moe.biases,
        gated=moe.gated,
        ranks={a.projection: a.rank for a in adapters if a.projection},
        rows=tokens * moe.top_k,
        experts=active_experts(moe, tokens),
        threads=threads,
        nodes=nodes,
        activation=activation,
    )


_LAYER_TENSORS = 40  # of hidden_size values, which a token takes at most in a decoder layer with gradients
_EXPERTS_TENSORS = 4  # of these, what the layer's experts get and return
LIVE = 3
"""Layers of which something waits on the GPU if the rest waits in host memory: one at work, its neighbour on its way,
and one to be freed.
"""
LARGEST_RECORDED = 24 << 20
"""The most bytes of a recorded layer's input: kernels that compute more keep a GPU busy while the host launches the
next. Of 16 MiB a recording is as fast, of 32 MiB slower than stored activations (docs/guide/step.md).
"""


def score_bytes(heads: int, sequence: int, eager: bool) -> int:
    """Bytes of a token's attention scores that backward keeps, in one layer. Fused attention keeps none."""
    return heads * sequence * _PROBABILITY_BYTES if eager else 0


def score_work(heads: int, batch: int, sequence: int, eager: bool) -> int:
    """Bytes of GPU memory that scores take while one micro-batch's attention runs, beside what backward keeps."""
    return batch * heads * sequence**2 * (_GPU_SCORE_BYTES - _PROBABILITY_BYTES) if eager else 0


def waiting_bytes(hidden_size: int, layers: int, value_bytes: int, checkpointing: bool, scores: int = 0) -> int:
    """The most bytes that a token takes while its micro-batch waits for others in the layers: each layer's input and
    the output of its experts, and a layer with gradients, without checkpointing all of them.

    Args:
        scores: `score_bytes`.
    """
    tensors = 2 * layers + _LAYER_TENSORS if checkpointing else layers * _LAYER_TENSORS
    return hidden_size * value_bytes * tensors + scores * (1 if checkpointing else layers)


def scores_of(shape: ModelShape, work: Workload) -> int:
    """`score_bytes` of a step."""
    return score_bytes(shape.heads, work.sequence, shape.eager)


def waiting_layers(layers: int, work: Workload) -> int:
    """Of how many layers what waits for backward is beside what computes."""
    return min(layers, LIVE) if work.away else layers


def further_bytes(shape: ModelShape, work: Workload, *, gpu: bool) -> int:
    """What each micro-batch takes that goes through the layers together with a first one."""
    layers, scores = waiting_layers(shape.layers, work), scores_of(shape, work)
    if gpu and work.mixed and work.checkpointing:
        inputs = shape.hidden_size * work.weight_bytes * 2 * layers
        return int(work.tokens * (inputs + _sparse_layer(shape, work)))
    return work.tokens * waiting_bytes(
        shape.hidden_size, layers, work.weight_bytes, work.checkpointing, scores if gpu else 0
    )


def _sparse_layer(shape: ModelShape, work: Workload) -> float:
    """Bytes per token that backward keeps of the largest layer with routed experts, of what is around them, and what
    they get and return.
    """
    return _around_experts(shape, work) + shape.hidden_size * BF16 * _EXPERTS_TENSORS + scores_of(shape, work)


def _around_experts(shape: ModelShape, work: Workload) -> float:
    """`_layer_kept` of the layers with routed experts."""
    return _layer_kept(replace(shape, linears=tuple(each for each in shape.linears if each.layer in shape.moe)), work)


def recorded_bytes(shape: ModelShape, work: Workload, packed: float) -> int:
    """What recordings take if all are made: of layers around their experts, where each micro-batch of those that go
    together has its own, and of steady passes. `packed` as in `lane_chunk`.
    """
    return _recorded_layers(shape, work) + (_steady_passes(shape, work, packed) if work.placement != "cpu" else 0)


def _steady_passes(shape: ModelShape, work: Workload, packed: float) -> int:
    """What `ktft.lanes.gpu.steady` keeps for calls of the experts with all tokens that go together."""
    tokens, most = work.together * work.expert_tokens, 0
    for number, moe in shape.moe.items():
        experts, _ = lane_chunk(moe, work.on_experts(number).spread, packed, residents=bool(work.gpu_expert_memory))
        chunks, needed = -(-moe.num_experts // experts), call_bytes(tokens, moe.top_k, moe.hidden_size, BF16)
        empty = empty_pieces(tokens * moe.top_k, chunks, moe.hidden_size, moe.intermediate_size)
        if moe.held.every_route and empty <= EMPTY_PIECES and needed <= SIZES_BYTES:
            most = max(most, needed)
    return most


def _recorded_layers(shape: ModelShape, work: Workload) -> int:
    inputs = work.tokens * shape.hidden_size * BF16
    if not (work.recorded and work.mixed) or inputs > LARGEST_RECORDED:
        return 0
    return int(work.together * work.tokens * _sparse_layer(shape, work))


def stored_layers(shape: ModelShape, work: Workload, free: int, used: int) -> tuple[int, int]:
    """How many checkpointed layers keep their activations (`ktft.model.stored`), and the bytes of VRAM that this takes,
    where so many bytes are free and in use. Layers that are recorded do not.
    """
    recorded = work.recorded and work.mixed and work.tokens * shape.hidden_size * BF16 <= LARGEST_RECORDED
    if not work.checkpointing or not work.mixed or work.away or recorded or shape.eager:
        return 0, 0
    room = free - spare_bytes(used)
    if isinstance(work.gpu_activation_memory, int):
        room = min(room, work.gpu_activation_memory)
    beside_input = _around_experts(shape, work) - shape.hidden_size * BF16
    each = int(work.together * work.tokens * beside_input)
    count = max(0, min(shape.layers, room // each))
    return count, count * each


def loss_chunks(shape: ModelShape, work: Workload) -> int:
    """In how many parts the logits of a micro-batch are computed."""
    return -(-work.tokens // lazy_logits.chunk_tokens(shape.vocab_size)) if work.chunked_loss else 1


def loss_bytes(shape: ModelShape, work: Workload, *, gpu: bool) -> int:
    """Bytes while the loss of one micro-batch is computed and differentiated."""
    if work.chunked_loss:
        return lazy_logits.loss_bytes(work.tokens, shape.vocab_size, shape.hidden_size, work.weight_bytes)
    each = _GPU_LOGIT_BYTES if gpu else _LOGIT_BYTES[work.weight_bytes] + (FP32 if work.mixed else 0)
    return work.tokens * shape.vocab_size * each


def spare_bytes(used: int) -> int:
    """Bytes of VRAM that stay free for longer batches where `used` are in use."""
    return max(SPARE_VRAM, int(used * SPARE_SHARE))


def _largest_layer(
    shape: ModelShape, work: Workload, output: float, lora_output: float, lora_input: float, without: int | None = None
) -> float:
    """Bytes per token of the linear layers of the decoder layer where they are most: `output` for each output feature,
    and of layers with LoRA `lora_output` and `lora_input` for each output and input feature. Inputs and outputs of
    `without` features do not count.
    """
    layers = _features(shape, work.elsewhere(), without)
    sizes = (plain * output + out * lora_output + into * lora_input for plain, out, into in layers)
    return max(sizes, default=0.0)


@functools.lru_cache(maxsize=64)
def _features(shape: ModelShape, adapters: PlannedAdapters, without: int | None) -> set[tuple[int, int, int]]:
    """What decoder layers have of output features without LoRA, and of output and input features with it."""
    adapted = {(a.layer, a.in_features, a.out_features) for a in adapters}
    layers: dict[int, tuple[int, int, int]] = {}
    for linear in shape.linears:
        if linear.layer is not None:
            into, out = (0 if each == without else each for each in (linear.in_features, linear.out_features))
            own = (linear.layer, linear.in_features, linear.out_features) in adapted
            plain, lora_out, lora_in = layers.get(linear.layer, (0, 0, 0))
            layers[linear.layer] = (plain, lora_out + out, lora_in + into) if own else (plain + out, lora_out, lora_in)
    return set(layers.values())


def _layer_activations(shape: ModelShape, work: Workload) -> float:
    """Bytes per token that torch keeps for the largest decoder layer, without its routed experts.

    torch keeps a linear layer's output, with LoRA also its input in the adapter's precision, fp32 norms, and the
    operands of attention.
    """
    wide = BF16 if work.mixed else work.weight_bytes
    linears = _largest_layer(shape, work, wide, 2 * wide, BF16 if work.mixed else FP32)
    attention = shape.heads * (4 * shape.qk_dim + 2 * shape.v_dim) * wide
    return linears + attention + shape.hidden_size * (4 * wide + 4 * FP32)


def _layer_kept(shape: ModelShape, work: Workload) -> float:
    """Bytes per token kept for backward by the largest decoder layer on a GPU, where LoRA on a linear layer is one
    autograd node and norms are fused: inputs and outputs of linear layers, rotated queries and keys, both residuals
    and both norms. What has the hidden size is one of these four: a norm that several layers read, or a sum.
    """
    linears = _largest_layer(shape, work, BF16, BF16, BF16, without=shape.hidden_size)
    return linears + BF16 * (2 * shape.heads * shape.qk_dim + 4 * shape.hidden_size)


def torch_activations(shape: ModelShape, work: Workload, *, gpu: bool) -> int:
    """Peak bytes that torch holds in one forward and backward pass, on the device of the model's other weights."""
    stream = work.tokens * shape.hidden_size * work.weight_bytes
    layer = work.tokens * _layer_activations(shape, work)
    fused = not shape.eager if gpu else shape.qk_dim == shape.v_dim
    every_score = 0 if fused else work.batch * shape.heads * work.sequence**2
    score = _GPU_SCORE_BYTES if gpu else _SCORE_BYTES
    copies = 0 if fused or gpu else work.tokens * shape.heads * (2 * shape.qk_dim + shape.v_dim) * FP32
    logits = loss_bytes(shape, work, gpu=gpu)
    if work.checkpointing:
        scores = every_score * score
        layer = _LAYER_WORK * work.tokens * _layer_kept(shape, work) if gpu and work.mixed else 2 * layer + copies
        # malloc does not return these blocks: one layer's are still allocated when the logits are computed
        left = 0 if gpu else layer + (scores if every_score * FP32 < _RETURNED_BLOCK else 0)
        return int(waiting_layers(shape.layers, work) * stream + max(logits + left, layer + scores))
    if gpu and work.mixed:
        layer = work.tokens * _layer_kept(shape, work)
    kept = layer + copies + every_score * _PROBABILITY_BYTES
    return int(shape.layers * kept + max(logits, every_score * (score - _PROBABILITY_BYTES)))


LATER_RAM = "its gradients and moments", "expert activations", "activations that wait"
"""Parts of the RAM that are taken during the first step."""


# --- the whole --------------------------------------------------------------------------------------------------------


_GATHERED = 6  # tensors of all ranks' tokens in one layer


def footprint(
    shape: ModelShape,
    work: Workload | None,
    expert_format: str,
    *,
    threads: int,
    nodes: int,
    gpu: bool,
    dense: DenseChoice = PLAIN_ON_GPU,
) -> Footprint:
    """The RAM and VRAM of training; or, if `work` is None, of only holding the model, with `dense` weights."""
    packed = packed_per_node(shape.moe.values(), expert_format, nodes)
    ram = {"experts": sum(packed), "python": BASELINE + (CUDA_LIBRARIES if gpu or torch.version.cuda else 0)}
    choice, recorded = (work.dense, gpu and work.recorded) if work else (dense, False)
    weights = dense_memory(shape, choice, work.weight_bytes if work else BF16, recorded=recorded)
    vram = {"cuda": CUDA_CONTEXT} if gpu else {}
    if gpu:
        ram["cuda"] = CUDA_HOST + (COLLECTIVES if work and work.ranks > 1 else 0)
    place = vram if gpu else ram
    place |= {"other weights": weights.gpu} | ({"other weights in use": weights.transit} if weights.transit else {})
    if weights.host:
        ram["other weights"] = weights.host
    if work is None:
        return Footprint(packed, ram, vram)
    lora = work.on_experts()
    own, summed = lora.parameters * FP32, lora.spread_grads
    ram["expert LoRA"] = own + lora.spread_bytes
    ram["its gradients and moments"] = work.training_bytes(lora) - own + (summed if gpu else 0)
    place["other LoRA, gradients, moments"] = work.training_bytes(work.elsewhere())
    on: dict[str, Any] = {"threads": threads, "nodes": nodes, "activation": work.expert_activation(gpu=gpu)}
    buffers = [
        expert_buffers(moe, work.expert_tokens, work.on_experts(number), **on) for number, moe in shape.moe.items()
    ]
    kept = [layer.retained for layer in buffers]
    retained = max(kept) if work.checkpointing else sum(kept)
    largest = max(layer.workspace for layer in buffers)
    io = 6 * work.expert_tokens * shape.hidden_size * FP32  # hidden states, outputs and their gradients in transit
    layer_grads = [work.on_experts(n).spread for n in shape.moe]
    # A further pass's gradients exist beside those they are added to, and each expert's before they are summed
    second = work.accumulation > 1 or summed > 0
    ram["expert activations"] = retained + largest + io + (max(layer_grads) * FP32 if second else 0)
    place["activations"] = torch_activations(shape, work, gpu=gpu)
    if work.together > 1:
        place["micro-batches together"] = (work.together - 1) * further_bytes(shape, work, gpu=gpu)
    if work.away:
        each = shape.layers * work.weight_bytes + len(shape.moe) * BF16
        ram["activations that wait"] = work.together * work.tokens * shape.hidden_size * each
    if work.ranks > 1:  # hidden states, outputs and their gradients of all ranks, of one layer
        place["tokens of other ranks"] = _GATHERED * work.expert_tokens * shape.hidden_size * BF16
    if gpu:
        blocks = 0 if work.chunked_loss else work.tokens * shape.vocab_size * (work.weight_bytes + FP32)
        vram["fragments"] = int(vram["activations"] * VRAM_FRAGMENTS) + blocks
        vram |= lane_bytes(shape, work, sum(packed))
        if recorded:
            vram[RECORDINGS] = weights.copies + recorded_bytes(shape, work, sum(packed) / shape.expert_parameters)
    return Footprint(packed, ram, vram)


def steady_bytes(need: Footprint) -> int:
    """Of the VRAM, what does not depend on the tokens of a step."""
    return sum(need.vram.get(name, 0) for name in _STEADY)


_STEADY = "cuda", "other weights", "other weights in use", "other LoRA, gradients, moments", "expert lanes"
RECORDINGS = "recordings"
STORED = "stored activations"
LANE_PARTS = ("expert lanes", "resident experts", "expert outputs")


def lane_bytes(shape: ModelShape, work: Workload, packed_bytes: int) -> dict[str, int]:
    """Bytes of VRAM that the experts take: buffers of streamed experts, resident experts (`auto`: none yet), and with
    checkpointing every layer's output, so that recomputing a layer does not run its experts again.
    """
    outputs = waiting_layers(len(shape.moe), work) * work.tokens * shape.hidden_size * BF16
    sizes = (
        0 if work.placement == "cpu" else _lane_buffers(shape, work, packed_bytes / shape.expert_parameters),
        resident_bytes(work.gpu_expert_memory, packed_bytes, free=0, used=0),
        outputs if work.checkpointing else 0,
    )
    return dict(zip(LANE_PARTS, sizes, strict=True))


def lane_chunk(moe: MoeShape, lora: int, packed: float, *, residents: bool) -> tuple[int, int]:
    """How many experts the GPU lane decodes at once, and the bytes of its buffers for each of them, by the rule of
    `ktft.lanes.gpu.buffers`: packed copies of `packed` bytes per parameter, one more if there are residents, some
    copies of its share of `lora` parameters, and one decoded copy.
    """
    parameters = moe.parameters / moe.num_experts
    copy = int(parameters * packed)
    one = int(2 * copy + parameters * _DECODED + ADAPTER_BUFFERS * lora * FP32 / moe.num_experts)
    experts, count = chunking(moe.num_experts, copy, one, CHUNK_BYTES, config.LANE_BYTES)
    return experts, one + (count - LEAST_BUFFERS + residents) * copy


def _lane_buffers(shape: ModelShape, work: Workload, packed: float) -> int:
    """Bytes of the lanes' buffers, which all layers share; `packed` as in `lane_chunk`."""

    def of_layer(number: int, moe: MoeShape) -> int:
        lora = work.on_experts(number).spread
        experts, each = lane_chunk(moe, lora, packed, residents=bool(work.gpu_expert_memory))
        return experts * each

    return max(of_layer(number, moe) for number, moe in shape.moe.items())


def resident_bytes(wished: int | str, packed_bytes: int, free: int, used: int) -> int:
    """Bytes of VRAM for resident experts: the value of `gpu_expert_memory`, or with `auto` the free VRAM minus a
    reserve for longer batches.
    """
    size = free - spare_bytes(used) if isinstance(wished, str) else wished
    return min(max(size, 0), packed_bytes)
