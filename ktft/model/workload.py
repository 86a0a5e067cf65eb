"""One optimizer step as planning sees it: its adapters, its tokens, and how it is run."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ktft.config import SHARED_OUTER
from ktft.model.dense_memory import PLAIN_ON_GPU, DenseChoice
from ktft.model.shape import MoeShape
from ktft.native.repeated import distinct_rows

FP32, BF16 = 4, 2
ADAM_STATES = 2  # fp32 moments per parameter


@dataclass(frozen=True)
class Adapter:
    """LoRA on `count` matrices of one shape: one linear layer, or one projection of all experts in a layer."""

    in_features: int
    out_features: int
    rank: int
    count: int = 1
    layer: int | None = None
    projection: str | None = None  # set for routed experts only
    shared: int = 0  # features of the side whose matrix all experts share; 0 if each has its own

    @property
    def parameters(self) -> int:
        """The number of parameters of A and B together."""
        return self.spread - (self.count - 1) * self.rank * self.shared

    @property
    def spread(self) -> int:
        """The number of elements that the kernels and lanes take, with a matrix for each expert."""
        return self.count * self.rank * (self.in_features + self.out_features)

    @property
    def spread_bytes(self) -> int:
        """Memory of a shared matrix spread over all experts, beside the parameter."""
        row = self.rank * self.shared * FP32
        return distinct_rows(self.count, row) * row

    @property
    def spread_grads(self) -> int:
        """Memory of each expert's gradient of a shared matrix, before they are summed."""
        return self.count * self.rank * self.shared * FP32


def _sum_of(name: str) -> functools.cached_property[int]:
    """The sum of a property of all adapters."""
    return functools.cached_property(lambda adapters: sum(getattr(each, name) for each in adapters))


class PlannedAdapters(tuple[Adapter, ...]):
    """Some LoRA. A plan asks the same of it for each workload that it tries, so each answer is found once.

    Attributes:
        parameters, spread, spread_bytes, spread_grads: the sums of theirs.
    """

    parameters = _sum_of("parameters")
    spread = _sum_of("spread")
    spread_bytes = _sum_of("spread_bytes")
    spread_grads = _sum_of("spread_grads")

    @functools.cached_property
    def on_experts(self) -> PlannedAdapters:
        """Those on routed experts."""
        return PlannedAdapters(a for a in self if a.projection)

    @functools.cached_property
    def elsewhere(self) -> PlannedAdapters:
        """Those on linear layers."""
        return PlannedAdapters(a for a in self if not a.projection)

    @functools.cached_property
    def by_layer(self) -> dict[int | None, PlannedAdapters]:
        """Those of each layer."""
        layers: dict[int | None, list[Adapter]] = {}
        for adapter in self:
            layers.setdefault(adapter.layer, []).append(adapter)
        return {layer: PlannedAdapters(own) for layer, own in layers.items()}

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()


@dataclass(frozen=True)
class Workload:
    """The properties of one optimizer step that memory and time depend on.

    `placement` and the two kinds of GPU memory are those of `ktft.config.Settings`; they have no effect without a GPU.
    """

    adapters: PlannedAdapters  # all LoRA
    batch: int  # sequences in one forward pass
    sequence: int  # tokens in each sequence
    accumulation: int = 1  # forward passes in one optimizer step
    checkpointing: bool = True  # of decoder layers
    activation: str = "retain"  # what native layers keep for backward; the other choice is "recompute"
    placement: str = "auto"
    gpu_expert_memory: int | str = 0
    gpu_activation_memory: int | str = 0
    states: float = ADAM_STATES  # moments per parameter that the optimizer keeps
    weight_bytes: int = BF16  # bytes per weight outside the experts
    mixed: bool = False  # whether autocast to 16 bits is on
    ranks: int = 1  # processes that share the experts, each with batches of its own
    together: int = 1  # micro-batches that go through each layer together
    dense: DenseChoice = PLAIN_ON_GPU  # of the weights outside the experts
    away: bool = False  # whether activations that wait for backward do so in host memory
    stored: float = 0.0  # the share of checkpointed layers that keep their activations, and are not run again
    chunked_loss: bool = True  # whether logits exist for a part of the tokens at a time
    cuda_graphs: bool = True
    deferred: bool = False  # whether the optimizer's step of expert LoRA goes on behind the next step

    @property
    def tokens(self) -> int:
        """Tokens in one forward pass."""
        return self.batch * self.sequence

    @property
    def expert_tokens(self) -> int:
        """Tokens of all ranks, which every rank's experts see in one forward pass."""
        return self.tokens * self.ranks

    @property
    def groups(self) -> int:
        """How often a step goes through the layers, forward and backward."""
        return -(-self.accumulation // self.together)

    @property
    def group(self) -> float:
        """Micro-batches that go together, on average over the groups of a step."""
        return self.accumulation / self.groups

    @property
    def recorded(self) -> bool:
        """Whether a GPU plays back recordings of what layers do around their experts."""
        return self.cuda_graphs and self.checkpointing

    def expert_activation(self, *, gpu: bool) -> str:
        """The activation mode of experts. With a GPU, checkpointing keeps their outputs and recomputes gate and up."""
        return "recompute" if gpu and self.checkpointing else self.activation

    def on_experts(self, layer: int | None = None) -> PlannedAdapters:
        """LoRA on the routed experts of one layer, or of all layers."""
        every = self.adapters.on_experts
        return every if layer is None else every.by_layer.get(layer, PlannedAdapters())

    def elsewhere(self) -> PlannedAdapters:
        """LoRA on linear layers."""
        return self.adapters.elsewhere

    def training_bytes(self, adapters: PlannedAdapters) -> int:
        """Bytes of parameters, gradients and moments. All are fp32: peft creates LoRA so for any model dtype."""
        return int(adapters.parameters * FP32 * (2 + self.states))


def expert_adapters(
    moe: dict[int, MoeShape], ranks: dict[int, dict[str, int]], form: str | None = None
) -> list[Adapter]:
    """The LoRA on routed experts that `ranks` describes: layer -> projection -> rank. `form` is one of `EXPERT_LORA`.

    What experts share are the matrices on the side of the hidden states.
    """
    shared = {layer: each.hidden_size if form == SHARED_OUTER else 0 for layer, each in moe.items()}
    return [
        Adapter(*each.projection(name), ranks[layer][name], each.num_experts, layer, name, shared[layer])
        for layer, each in moe.items()
        for name in each.projections
        if name in ranks.get(layer, {})
    ]
