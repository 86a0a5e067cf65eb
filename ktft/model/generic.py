"""The family of a transformers model: its row in the table, or a family derived from what transformers knows of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import _default_apply_gate

from ktft.checkpoint.families import FAMILIES, Family
from ktft.model import kimi_k2, lacking
from ktft.model.computed import activation_of
from ktft.model.experts import is_transposed
from ktft.model.layouts import layouts_of
from ktft.swiglu import Swiglu

kimi_k2.register()
lacking.register()

CALL = ("hidden_states", "top_k_index", "top_k_weights")
"""The arguments of routed experts in transformers 5."""


@dataclass(frozen=True)
class DerivedFamily(Family):
    """A family without a row. What its experts compute was measured, whatever else its settings say."""

    def activation(self, config: Any, layer: int) -> Swiglu:
        """The measured activation, of any layer."""
        return self.swiglu


def family_of(model: PreTrainedModel) -> Family:
    """The family of a transformers model: its row in `FAMILIES`, or one derived from modules that take `CALL`.

    A model that sees images may have a row by its text model alone, as Mistral-4 has in Mistral-3's.

    Raises:
        ValueError: the model has no row, and ktft cannot compute its experts.
    """
    text: Any = model.config.get_text_config()
    return FAMILIES.get(model.config.model_type) or FAMILIES.get(text.model_type) or _derive(model)


def _derive(model: PreTrainedModel) -> Family:
    """Derive the family of gated experts that take `CALL`, with stacked gate_up_proj and down_proj."""
    model_type = model.config.model_type
    experts = {name: module for name, module in model.named_modules() if _looks_like_experts(module)}
    known = ", ".join(FAMILIES)
    refusal = f"model_type {model_type!r} has no row in ktft's table of families (it has {known})"
    if not experts:
        raise ValueError(
            f"{refusal}, and no module of {type(model).__name__} holds its routed experts as transformers 5 does, "
            f"stacked and called with {', '.join(CALL)}; train it without ktft (in LLaMA-Factory use_kt: false)"
        )
    for name, module in experts.items():
        if problems := list(_problems(module)):
            raise ValueError(
                f"{refusal}, and its experts {name} ({type(module).__name__}) are not SiLU(gate) * up as transformers "
                f"5 calls and stacks it. They have {'; '.join(problems)}. docs/dev/add-a-model.md says what a row needs"
            )
    classes = sorted({type(module).__name__ for module in experts.values()})
    if len(classes) > 1:
        raise ValueError(f"{refusal}, and it has experts of several classes ({', '.join(classes)}): add a row for one")
    name, first = next(iter(experts.items()))
    computed = {activation_of(module, is_transposed(module)) for module in experts.values()}
    swiglu = computed.pop()
    if computed:
        raise ValueError(
            f"{refusal}, and its layers' experts ({classes[0]}) compute different things, which a row cannot"
        )
    if swiglu is None:
        raise ValueError(
            f"{refusal}, and its experts {name} ({classes[0]}) compute something else than ktft's kernels, which have "
            f"SiLU(gate) * up, GELU's, and both with limits. They have {'; '.join(_apart(first))}. "
            "docs/dev/add-a-model.md says what a row needs"
        )
    siblings = dict(model.get_submodule(name.rpartition(".")[0]).named_children())
    router = next((sibling for sibling in ("gate", "router") if sibling in siblings), "gate")
    indexers = {each.rpartition(".")[2] for each, _ in model.named_modules()} & {"indexer"}
    return DerivedFamily(
        f"{model_type} (no row: as transformers lays it out)",
        (model_type,),
        classes[0],
        layouts=layouts_of(model, name, is_transposed(first)),
        swiglu=swiglu,
        router=router,
        without_lora=(router, *indexers),
    )


def _looks_like_experts(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    return any(name in parameters and parameters[name].dim() == 3 for name in ("gate_up_proj", "up_proj", "down_proj"))


def _problems(module: nn.Module) -> Iterator[str]:
    """Ways in which an experts module differs from the defaults of the decorator `use_experts_implementation`."""
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    arguments = tuple(inspect.signature(module.forward).parameters)
    if not hasattr(module, "has_gate"):
        yield "a forward of their own, which transformers' other implementations of experts cannot replace"
    if arguments != CALL:
        yield f"a forward({', '.join(arguments)}) instead of forward({', '.join(CALL)})"
    if "gate_up_proj" not in parameters:
        yield "no gate projection"
    else:
        experts, *down = parameters.get("down_proj", (0, 0, 0))
        hidden, intermediate = reversed(down) if is_transposed(module) else down
        expected = {"gate_up_proj": (experts, 2 * intermediate, hidden), "down_proj": (experts, hidden, intermediate)}
        if is_transposed(module):
            expected = {each: (count, cols, rows) for each, (count, rows, cols) in expected.items()}
        if parameters != expected:
            found = ", ".join(f"{name} {list(shape)}" for name, shape in parameters.items())
            yield f"the parameters {found} instead of gate_up_proj [E, 2I, H] and down_proj [E, H, I] alone"
    if getattr(module, "has_post_expert_norm", False):
        yield "a norm after each expert"


def _apart(module: nn.Module) -> Iterator[str]:
    """What is known of an activation that no kernel computes."""
    activation = getattr(module, "act_fn", None)
    yield f"the activation {getattr(activation, '__name__', type(activation).__name__)}"
    if getattr(type(module), "_apply_gate", _default_apply_gate) is not _default_apply_gate:
        yield "a gating function of their own"
