"""The family of a transformers model: its row in the table, or a family derived from what transformers knows of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.moe import _default_apply_gate

from ktft.checkpoint.families import FAMILIES, STACKED, Family, Layout
from ktft.config import PROJECTIONS
from ktft.model import kimi_k2, lacking
from ktft.model.experts import layer_number

kimi_k2.register()
lacking.register()

CALL = ("hidden_states", "top_k_index", "top_k_weights")
"""The arguments of routed experts in transformers 5."""
MERGES = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
"""The operations by which transformers stacks experts that a checkpoint holds one by one."""
ALIGNMENT = "Force16BytesAlignment"
"""One more of them in transformers 5.3, which changes no value."""


def family_of(model: PreTrainedModel) -> Family:
    """The family of a transformers model: its row in `FAMILIES`, or one derived from modules that take `CALL`.

    A model that sees images may have a row by its text model alone, as Mistral-4 has in Mistral-3's.

    Raises:
        ValueError: the model has no row, and ktft cannot compute its experts.
    """
    text: Any = model.config.get_text_config()
    return FAMILIES.get(model.config.model_type) or FAMILIES.get(text.model_type) or _derive(model)


def _derive(model: PreTrainedModel) -> Family:
    """Derive the family of SiLU experts that take `CALL`, with stacked gate_up_proj [E, 2I, H], down_proj [E, H, I]."""
    model_type = model.config.model_type
    experts = {name: module for name, module in model.named_modules() if _looks_like_experts(module)}
    known = ", ".join(FAMILIES)
    refusal = f"model_type {model_type!r} has no row in ktft's table of families (it has {known})"
    if not experts:
        raise ValueError(
            f"{refusal}, and no module of {type(model).__name__} holds its routed experts as transformers 5 does, "
            f"stacked and called with {', '.join(CALL)}"
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
    name = next(iter(experts))
    siblings = dict(model.get_submodule(name.rpartition(".")[0]).named_children())
    router = next((sibling for sibling in ("gate", "router") if sibling in siblings), "gate")
    return Family(
        f"{model_type} (no row: as transformers lays it out)",
        (model_type,),
        classes[0],
        layouts=_layouts(model, name),
        router=router,
        without_lora=(router,),
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
    elif getattr(module, "is_transposed", False):
        yield "transposed weights"
    else:
        experts, hidden, intermediate = parameters.get("down_proj", (0, 0, 0))
        expected = {"gate_up_proj": (experts, 2 * intermediate, hidden), "down_proj": (experts, hidden, intermediate)}
        if parameters != expected:
            found = ", ".join(f"{name} {list(shape)}" for name, shape in parameters.items())
            yield f"the parameters {found} instead of gate_up_proj [E, 2I, H] and down_proj [E, H, I] alone"
    activation = getattr(module, "act_fn", None)
    if not (isinstance(activation, nn.SiLU | SiLUActivation) or activation is torch.nn.functional.silu):
        yield f"the activation {getattr(activation, '__name__', type(activation).__name__)} instead of SiLU"
    if getattr(type(module), "_apply_gate", _default_apply_gate) is not _default_apply_gate:
        yield "a gating function of their own"
    if getattr(module, "has_post_expert_norm", False):
        yield "a norm after each expert"


def _layouts(model: PreTrainedModel, name: str) -> tuple[Layout, ...]:
    """The layouts on disk of the experts in module `name`, derived from the conversions by which transformers loads."""
    conversions = get_model_conversion_mapping(model)
    stems = {kind: f"{name}.{kind}" for kind in ("gate_up_proj", "down_proj")}
    found: dict[str, list[str]] = {}
    for conversion in conversions:
        for kind, stem in stems.items():
            if not isinstance(conversion, WeightConverter) or not stem.endswith(conversion.target_patterns[0]):
                continue
            operations = [type(operation).__name__ for operation in conversion.operations]
            if [each for each in operations if each != ALIGNMENT] not in MERGES:
                raise ValueError(
                    f"the experts of model_type {model.config.model_type!r} are converted on loading by "
                    f"{', '.join(operations)}; add a row with their layout to ktft's families"
                )
            start = stem.removesuffix(conversion.target_patterns[0])
            # transformers 5.3 and 5.4 keep the patterns of a conversion as they were given, regular expressions or not
            sources = getattr(conversion, "_original_source_patterns", conversion.source_patterns)
            found[kind] = [start + source.replace("\\.", ".").removesuffix(".weight") for source in sources]
    layer = f".{layer_number(name)}."
    if not found:
        return (Layout(f"{name.replace(layer, '.{layer}.', 1)}.{{projection}}", names=STACKED.names),)
    readable = [_on_disk(stem, conversions) for stem in (*found["gate_up_proj"], *found["down_proj"])]
    layouts = []
    for stems_on_disk in zip(*readable, strict=False):
        prefixes = {stem.rpartition(".")[0] for stem in stems_on_disk}
        if len(stems_on_disk) != len(PROJECTIONS) or len(prefixes) > 1:
            raise ValueError(f"cannot tell where checkpoints of {model.config.model_type!r} hold {name}; add a row")
        prefix = prefixes.pop().replace(layer, ".{layer}.", 1).replace(".*", ".{expert}", 1)
        gate, up, down = (stem.rpartition(".")[2] for stem in stems_on_disk)
        layouts.append(Layout(f"{prefix}.{{projection}}", names=(gate, up, down)))
    return tuple(layouts)


def _on_disk(stem: str, conversions: list[Any]) -> list[str]:
    """The names on disk of what `stem` is in the model: what transformers would save it as, and the same, if it reads
    that as it is, as it does the newer names of GLM-4.5V.

    Raises:
        ValueError: transformers would read neither.
    """
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    saved = stem
    for renaming in reversed(renamings):
        saved, _ = renaming.reverse_transform().rename_source_key(saved)
    names = [*dict.fromkeys((saved, stem))]
    if read := [name for name in names if rename_source_key(f"{name}.weight", renamings, [])[0] == f"{stem}.weight"]:
        return read
    raise ValueError(f"cannot tell where checkpoints hold {stem}, which transformers would save as {saved}; add a row")
