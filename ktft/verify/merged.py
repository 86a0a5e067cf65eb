"""Compares what `ktft merge` wrote with the base model and the adapter beside it: logits, or layer by layer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoConfig

from ktft.adapters.saved import SavedAdapter
from ktft.checkpoint.schemes import Scheme
from ktft.config import Settings
from ktft.formats import FORMAT_TRAITS
from ktft.model.experts import experts_family
from ktft.model.load_plan import LoadPlan, outline
from ktft.model.shape import shape_of, top_k_of
from ktft.native import ExpertLayer
from ktft.verify.contract import comparable, relative_error
from ktft.verify.layers import SEED
from ktft.verify.whole import AMPLIFIED, Choices, load_model, logits_of, outermost_experts, random_tokens

EXACT_LIMIT = 0.01
"""The limit of the logits' relative error for weights stored in 16 bits or more."""
TOKENS = 64


@dataclass(frozen=True)
class MergeCheck:
    """The result of the comparison.

    Attributes:
        method: `logits`, or `layers` where the model does not fit in memory.
        error: relative error of the logits, or of the worst of all experts' outputs and other merged weights.
        limit: the largest error allowed.
        effect: the relative change of the logits by the adapter itself; None for `layers`.
        where: the worst layer or weight; None for `logits`.
    """

    method: str
    error: float
    limit: float
    effect: float | None = None
    where: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the error is within its limit. NaN is not."""
        return self.error <= self.limit

    @property
    def drowned(self) -> bool:
        """Whether rounding changes more than the adapter does."""
        return self.effect is not None and self.error > self.effect

    def to_dict(self) -> dict[str, Any]:
        """The result for the report, rounded to three digits."""
        values = asdict(self) | {"passed": self.passed}
        return {k: float(f"{v:.3g}") if isinstance(v, float) and math.isfinite(v) else v for k, v in values.items()}


def limit_of(storage: str, scheme: Scheme, noise: float = 0.0) -> float:
    """The largest relative error that rounding the merged weights may cause in an output, by their storage formats.

    Args:
        storage: the value of `--format`.
        scheme: the base model's scheme, which weights around packed experts keep.
        noise: the relative error of the same output computed in bf16, because some models amplify every rounding.
    """
    kinds = {storage} - {"same", "bf16"}
    if storage != "bf16" and scheme.rounds_as is not None:
        kinds.add(scheme.rounds_as)
    amplified = max(AMPLIFIED, noise / FORMAT_TRAITS["bf16"].error)
    return max([EXACT_LIMIT, noise, *(amplified * FORMAT_TRAITS[kind].error for kind in kinds)])


def logits_bytes(base: Path) -> int:
    """Memory that `check_logits` needs: experts in bf16, everything else in fp32."""
    shape, _ = shape_of(AutoConfig.from_pretrained(base))
    return 2 * shape.expert_parameters + 4 * shape.other_parameters


def check_logits(
    base: Path, adapter: Path, merged: Path, settings: Settings, packed: bool, storage: str, scheme: Scheme
) -> MergeCheck:
    """Compare both models on one sequence of random tokens. The second model uses the experts that the first chose.

    Args:
        packed: whether the merged experts are packed, and so have their format already.
        storage, scheme: see `limit_of`.
    """
    before = load_model(base, settings, adapter)
    assert isinstance(before, PeftModel)
    inner: Any = before.get_base_model()
    family = experts_family(inner)
    ids = random_tokens(inner, TOKENS)
    choices = Choices(set(family.without_lora) - {family.router})
    with torch.no_grad():
        with choices.recorded(inner):
            expected = logits_of(inner, ids)
        with before.disable_adapter(), choices.replayed(inner, {}):
            alone = logits_of(inner, ids)
        with choices.replayed(before.to(torch.bfloat16).get_base_model(), outermost_experts(inner)):
            noise = relative_error(logits_of(inner, ids), expected)
    del before, inner
    after = load_model(merged, _for(settings, packed), None)
    with torch.no_grad(), choices.replayed(after, outermost_experts(after)):
        found = logits_of(after, ids)
    limit = limit_of(storage, scheme, noise)
    return MergeCheck("logits", relative_error(found, expected), limit, relative_error(alone, expected))


def _for(settings: Settings, packed: bool) -> Settings:
    return Settings(threads=settings.threads, numa_nodes=settings.numa_nodes) if packed else settings


def check_layers(
    base: Path, adapter: Path, merged: Path, settings: Settings, packed: bool, limit: float, found: list[MergeCheck]
) -> Iterator[tuple[str, int]]:
    """Compare models that do not fit in memory: one layer's experts at a time, then every other merged weight.

    Yields (what was done, bytes read) and adds the result to `found`.
    """
    saved = SavedAdapter(adapter, AutoConfig.from_pretrained(base))
    before, after = outline(base, settings), outline(merged, _for(settings, packed))
    errors: list[tuple[float, str]] = []
    top_k = top_k_of(saved.base.get_text_config())
    for number in sorted(before.layers):
        old, new = before.layers.pop(number), after.layers.pop(number)
        generator = torch.Generator().manual_seed(SEED + number)
        inputs = _random_inputs(old, top_k, generator)
        lora = saved.lora(old.name)
        for nbytes in before.experts.load({number: old}):
            yield f"checking layer {number}", nbytes
        expected = old.forward(*inputs, lora, "none")[0]
        del old
        for nbytes in after.experts.load({number: new}):
            yield f"checking layer {number}", nbytes
        errors.append((relative_error(new.forward(*inputs, None, "none")[0], expected), f"experts of layer {number}"))
    for name in (*(place.name for place in saved.linears), *saved.whole):
        weight = _weight(before, name)
        errors.append((relative_error(_weight(after, name), weight + saved.delta(name).matrix(weight)), name))
        yield f"checking {name}", 0
    worst, where = max(errors, key=lambda error: comparable(error[0]))
    found.append(MergeCheck("layers", worst, limit, where=where))


def layers_bytes(base: Path, merged: Path, settings: Settings, packed: bool) -> int:
    """Bytes that `check_layers` reads."""
    return outline(base, settings).experts.nbytes() + outline(merged, _for(settings, packed)).experts.nbytes()


def _random_inputs(layer: ExpertLayer, top_k: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random hidden states, experts and routing weights of enough tokens for each expert."""
    tokens = max(TOKENS, 2 * layer.num_experts // top_k)
    hidden = torch.randn(tokens, layer.hidden_size, generator=generator)
    index = torch.rand(tokens, layer.num_experts, generator=generator).topk(top_k).indices
    return hidden, index, torch.rand(tokens, top_k, generator=generator).softmax(-1)


def _weight(plan: LoadPlan, name: str) -> Tensor:
    stored = plan.backbone.stored(f"{name}.weight") or plan.backbone.stored(name)
    assert stored is not None, name
    scheme, parts = stored
    reader = plan.backbone.checkpoint
    return scheme.decode({role: reader.read(entry.name) for role, entry in parts.items()}).dequantize()
