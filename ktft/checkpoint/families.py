"""The MoE families ktft knows, one row each. Supporting another one is another row."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ktft.config import PROJECTIONS


@dataclass(frozen=True)
class ExpertSource:
    """Where a checkpoint holds one projection of one expert.

    Attributes:
        stem: the tensor's name without what a quantization scheme appends: a plain tensor of one expert is called
            `stem.weight`, a stacked one `stem`.
        expert: index into the first dimension of a stacked tensor; None where every expert has its own.
        rows: which rows of the `[out_features, in_features]` matrix are this projection, where gate and up share one.
        transposed: stored `[in_features, out_features]`.
    """

    stem: str
    expert: int | None = None
    rows: slice = field(default_factory=lambda: slice(None))
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """Where a model family keeps its experts, in transformers' module tree and in its checkpoints.

    Attributes:
        name: what people call it.
        model_type: `model_type` in config.json.
        experts_class: transformers' class of one layer's stacked routed experts, which ktft replaces.
        expert_tensor: a weight's name in the checkpoint, with {layer}, {expert} and {projection} in braces.
        attention, shared_experts, routed_experts, router: module names, as they appear in parameter names.
        router_lora: whether forward uses a LoRA placed on the router module. False where forward reads the router's
            weight directly, so that LoRA there would never get a gradient.
        activation: the only `hidden_act` the experts' kernels compute.
    """

    name: str
    model_type: str
    experts_class: str
    expert_tensor: str = "model.layers.{layer}.mlp.experts.{expert}.{projection}.weight"
    attention: str = "self_attn"
    shared_experts: str = "shared_experts"
    routed_experts: str = "experts"
    router: str = "gate"
    router_lora: bool = False
    activation: str = "silu"

    def tensor_name(self, layer: int, expert: int, projection: str) -> str:
        """The name of one expert's projection in the checkpoint."""
        return self.expert_tensor.format(layer=layer, expert=expert, projection=projection)

    def source(self, layer: int, expert: int, projection: str) -> ExpertSource:
        """Where the checkpoint holds one expert's projection."""
        return ExpertSource(self.tensor_name(layer, expert, projection).removesuffix(".weight"))

    def expert_pattern(self) -> re.Pattern[str]:
        """Matches the name of any tensor that belongs to a routed expert, its bias and scales included."""
        stem = self.expert_tensor.split("{projection}")[0]
        pattern = re.escape(stem).replace(r"\{layer\}", r"(?P<layer>\d+)").replace(r"\{expert\}", r"(?P<expert>\d+)")
        return re.compile(f"^{pattern}(?P<projection>{'|'.join(PROJECTIONS)})\\.")


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("Qwen3-MoE", "qwen3_moe", "Qwen3MoeExperts"),
        Family("DeepSeek-V2", "deepseek_v2", "DeepseekV2Experts"),
        Family("DeepSeek-V3", "deepseek_v3", "DeepseekV3NaiveMoe"),
    )
}

GROUPS = ("attention", "shared experts", "routed experts", "router", "other")


def family_of(model_type: str) -> Family:
    """The family of a config's `model_type`.

    Raises:
        ValueError: ktft has no row for it.
    """
    if model_type not in FAMILIES:
        known = ", ".join(f"{family.model_type} ({family.name})" for family in FAMILIES.values())
        raise ValueError(f"model_type {model_type!r} is not supported by ktft; supported: {known}")
    return FAMILIES[model_type]


def group_of(parameter_name: str, family: Family) -> str:
    """Which of `GROUPS` a parameter, a LoRA tensor included, belongs to."""
    path = parameter_name.split(".")
    modules = (family.attention, family.shared_experts, family.routed_experts, family.router)
    return next((group for group, module in zip(GROUPS, modules, strict=False) if module in path), "other")
