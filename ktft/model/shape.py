"""The sizes of a model that planning memory and time needs, read from its modules on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ktft.checkpoint.families import Family
from ktft.dense.formats import stays
from ktft.held import HeldExperts
from ktft.model.experts import KtftExperts, expert_modules, layer_of
from ktft.model.generic import family_of
from ktft.model.meta import meta_model
from ktft.model.sinks import keeps_scores
from ktft.swiglu import projections

# The config keys, across families, for the number of experts that a token is routed to.
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")


@dataclass(frozen=True)
class MoeShape:
    """The sizes of one layer's routed experts. It replaces the `ExpertLayer` where only sizes matter."""

    num_experts: int  # that this process holds
    top_k: int  # the number of the model's experts that a token is routed to
    hidden_size: int
    intermediate_size: int
    biases: bool = False
    gated: bool = True
    part: HeldExperts | None = None  # which of the model's experts these are; None if they are all of them

    @property
    def held(self) -> HeldExperts:
        return self.part or HeldExperts.of(self.num_experts)

    @property
    def projections(self) -> tuple[str, ...]:
        """The projections that each expert has."""
        return projections(self.gated)

    @property
    def parameters(self) -> int:
        """The number of parameters in all experts' weights, without biases."""
        return len(self.projections) * self.num_experts * self.hidden_size * self.intermediate_size

    def projection(self, name: str) -> tuple[int, int]:
        """(in_features, out_features) of one expert's projection."""
        dims = (self.hidden_size, self.intermediate_size)
        return dims[::-1] if name == "down_proj" else dims


@dataclass(frozen=True)
class LinearShape:
    """One linear layer outside the routed experts; `layer` is its decoder layer's number, None if it is in none.

    `packs` is false for one that keeps the model's dtype whatever `dense_format` is: a router, the gate of shared
    experts, and an output layer that is the embedding table.
    """

    name: str
    in_features: int
    out_features: int
    layer: int | None
    packs: bool = True

    @property
    def parameters(self) -> int:
        """The number of its weights, without a bias."""
        return self.in_features * self.out_features


@dataclass(frozen=True, eq=False)  # so that it has a hash, by which what was computed of a shape is found
class ModelShape:
    """The sizes of a model that planning needs; all but `other_parameters` are the text model's.

    `linears` are all linear layers outside the routed experts, including the output layer. Vision layers are left out:
    LLaMA-Factory keeps them frozen, and no text passes through them.
    """

    model_type: str
    moe: dict[int, MoeShape]  # by layer number
    linears: tuple[LinearShape, ...]
    other_parameters: int  # elements in parameters and buffers, without the routed experts' weights
    layers: int
    hidden_size: int
    vocab_size: int
    heads: int  # of attention
    qk_dim: int  # the width of a head's queries and keys
    v_dim: int  # and of its values
    eager: bool = False  # whether attention's scores are in memory, since the model has no fused attention
    embedding: int = 0  # elements of the embedding table; 0 if it is the output layer too

    @property
    def expert_parameters(self) -> int:
        return sum(moe.parameters for moe in self.moe.values())


def top_k_of(config: Any) -> int:
    """The `top_k` of a text model's config.

    Raises:
        ValueError: the config has none of `TOP_K_KEYS`.
    """
    for key in TOP_K_KEYS:
        if isinstance(value := getattr(config, key, None), int):
            return value
    raise ValueError(f"config.json of {config.model_type} has none of {', '.join(TOP_K_KEYS)}")


def heads_of(config: Any) -> int:
    """The most attention heads that a layer of a text model has."""
    try:
        return int(config.num_attention_heads)
    except RuntimeError:  # transformers 5.17 and later say so if layers differ
        return max(int(each.num_attention_heads) for each in config.per_layer_config)


def empty_experts(
    model: PreTrainedModel, family: Family, part: tuple[int, int] | None = None, ranks: int = 1
) -> dict[int, MoeShape]:
    """Replace the routed experts by `KtftExperts` that hold only sizes, so that adapters find their places.

    Args:
        model: a model on the meta device; family: its family.
        part: (first, end) of the experts of each layer that the process holds, end excluded; by default all.
        ranks: if several processes share the experts, the shapes are of the first one's share, the largest.
    """
    top_k = top_k_of(model.config.get_text_config())
    shapes = {}
    for number, name, (experts, hidden_size, intermediate_size) in expert_modules(model, family):
        held = HeldExperts.of(experts, part) if ranks == 1 else HeldExperts.share_of(experts, 0, ranks)
        sizes = held.count, top_k, hidden_size, intermediate_size
        shapes[number] = MoeShape(*sizes, family.biases, family.swiglu.gated, held)
        model.set_submodule(name, KtftExperts(shapes[number], family))
    return shapes


def read_shape(model: PreTrainedModel, moe: dict[int, MoeShape]) -> ModelShape:
    """The shape of a model whose parameters no longer include the routed experts."""
    text = model.config.get_text_config()
    heads = heads_of(text)
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    nope, rope = getattr(text, "qk_nope_head_dim", None), getattr(text, "qk_rope_head_dim", None)
    text_only, output = text is model.config, model.get_output_embeddings()
    table: Any = model.get_input_embeddings().weight
    tied = getattr(output, "weight", None) is table
    tensors = {id(t): t.numel() for t in (*model.parameters(), *model.buffers())}
    blocks = {  # around the experts -> the outputs of their router
        name.rpartition(".")[0] + ".": moe[number].held.num_experts + moe[number].held.zero
        for name, module in model.named_modules()
        if isinstance(module, KtftExperts) and (number := layer_of(name)) is not None
    }

    def packs(name: str, module: nn.Linear) -> bool:
        own = next((experts for block, experts in blocks.items() if name.startswith(block)), None)
        return not (tied and module is output) and (own is None or not stays(module.out_features, own))

    return ModelShape(
        model_type=model.config.model_type,
        moe=moe,
        linears=tuple(
            LinearShape(name, module.in_features, module.out_features, layer_of(name), packs(name, module))
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and (text_only or module is output or "language_model" in name.split("."))
        ),
        other_parameters=sum(tensors.values()),
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        heads=heads,
        qk_dim=nope + rope if nope and rope else head_dim,
        v_dim=getattr(text, "v_head_dim", None) or head_dim,
        eager=keeps_scores(model),
        embedding=0 if tied else table.numel(),
    )


def shape_of(
    config: PreTrainedConfig, part: tuple[int, int] | None = None, ranks: int = 1
) -> tuple[ModelShape, PreTrainedModel]:
    """The shape of a config's model, and the model on the meta device with empty `KtftExperts`.

    `part` and `ranks` are explained at `empty_experts`.

    Raises:
        ValueError: ktft does not support the model.
    """
    model = meta_model(config)
    moe = empty_experts(model, family_of(model), part, ranks)
    return read_shape(model, moe), model
