"""Which modules of a transformers model are its routed experts, and `KtftExperts` in their place."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming
from transformers.integrations.moe import _default_apply_gate

from ktft import native
from ktft.checkpoint.families import FAMILIES, STACKED, Family, Layout
from ktft.config import PROJECTIONS, Settings
from ktft.model.experts import KtftExperts

CALL = ("hidden_states", "top_k_index", "top_k_weights")
"""Arguments of transformers 5's routed experts."""


@dataclass(frozen=True)
class ExpertModule:
    """One layer's routed experts in a transformers model, which may be on the meta device."""

    name: str
    layer: int
    num_experts: int
    hidden_size: int
    intermediate_size: int


def family_of(model: nn.Module) -> Family:
    """The family of a transformers model: its row, or one derived from modules that follow transformers' call.

    Raises:
        ValueError: there is no row, and the model's experts are none that ktft computes.
    """
    config: Any = model.config
    return FAMILIES.get(config.model_type) or _derive(model)


def expert_modules(model: nn.Module, family: Family) -> list[ExpertModule]:
    """The routed experts' modules, by layer number.

    Raises:
        ValueError: the model has none of the family's class.
    """
    found = []
    for name, module in model.named_modules():
        if type(module).__name__ != family.experts_class:
            continue
        shape = tuple(module.get_parameter("down_proj").shape)
        experts, hidden, intermediate = (shape[0], shape[2], shape[1]) if module.is_transposed else shape
        found.append(ExpertModule(name, _layer_number(name), experts, hidden, intermediate))
    if not found:
        raise ValueError(
            f"{type(model).__name__} (model_type {model.config.model_type!r}) has no {family.experts_class} to "
            "replace; load it with transformers' own code (trust_remote_code: false) and at least one MoE layer"
        )
    return found


def swap_experts(model: nn.Module, family: Family, settings: Settings) -> dict[int, KtftExperts]:
    """Put an empty `KtftExperts` in place of every stacked experts module. Returns them by layer number.

    Raises:
        ValueError: the model has no such module, or an activation or dims that the kernels cannot take.
    """
    config: Any = model.config
    swiglu = family.activation(config.get_text_config())
    runtime = native.runtime(settings.threads, settings.numa_nodes)
    experts: dict[int, KtftExperts] = {}
    for module in expert_modules(model, family):
        layer = native.ExpertLayer(
            runtime,
            num_experts=module.num_experts,
            hidden_size=module.hidden_size,
            intermediate_size=module.intermediate_size,
            format=settings.expert_format,
            name=module.name,
            swiglu=swiglu,
            biases=family.biases,
        )
        experts[module.layer] = KtftExperts(layer, family, settings.activation)
        model.set_submodule(module.name, experts[module.layer])
    return experts


def _layer_number(name: str) -> int:
    number = re.search(r"\blayers\.(\d+)\.", name)
    if number is None:
        raise ValueError(f"the experts {name} are in no layer with a number; ktft needs layers.N in their name")
    return int(number[1])


# --- families without a row -------------------------------------------------------------------------------------------


def _derive(model: nn.Module) -> Family:
    """The family of experts that take `CALL`, with stacked gate_up_proj [E, 2I, H] and down_proj [E, H, I] and SiLU."""
    model_type = model.config.model_type
    experts = {name: module for name, module in model.named_modules() if _looks_like_experts(module)}
    known = ", ".join(f"{kind} ({family.name})" for kind, family in FAMILIES.items())
    refusal = f"model_type {model_type!r} has no row in ktft's table of families ({known})"
    if not experts:
        raise ValueError(
            f"{refusal}, and no module of {type(model).__name__} holds its routed experts as transformers 5 does, "
            f"stacked and called with {', '.join(CALL)}"
        )
    for name, module in experts.items():
        if problems := list(_problems(module)):
            raise ValueError(
                f"{refusal}, and its experts {name} ({type(module).__name__}) need what ktft's kernels or its generic "
                f"path do not have: {'; '.join(problems)}"
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
        layouts=(_layout(model, name),),
        router=router,
        without_lora=(router,),
    )


def _looks_like_experts(module: nn.Module) -> bool:
    parameters = dict(module.named_parameters(recurse=False))
    return any(name in parameters and parameters[name].dim() == 3 for name in ("gate_up_proj", "up_proj", "down_proj"))


def _problems(module: nn.Module) -> Iterator[str]:
    """What keeps one experts module from being computed as SiLU(gate) · up."""
    parameters = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}
    arguments = tuple(inspect.signature(module.forward).parameters)
    if arguments != CALL:
        yield f"a forward that takes {', '.join(arguments)}, not {', '.join(CALL)}"
    if "gate_up_proj" not in parameters:
        yield "experts without a gate projection (an epilogue for their activation)"
    elif getattr(module, "is_transposed", False):
        yield "transposed weights (a row with a layout)"
    else:
        experts, hidden, intermediate = parameters.get("down_proj", (0, 0, 0))
        expected = {"gate_up_proj": (experts, 2 * intermediate, hidden), "down_proj": (experts, hidden, intermediate)}
        if parameters != expected:
            yield f"parameters {parameters}, not gate_up_proj [E, 2I, H] and down_proj [E, H, I] alone"
    activation = getattr(module, "act_fn", None)
    if not (isinstance(activation, nn.SiLU | SiLUActivation) or activation is torch.nn.functional.silu):
        yield f"the activation {getattr(activation, '__name__', type(activation).__name__)}, not SiLU"
    if getattr(type(module), "_apply_gate", _default_apply_gate) is not _default_apply_gate:
        yield "a gating function of its own (a row with its constants)"


def _layout(model: nn.Module, name: str) -> Layout:
    """How checkpoints hold the experts of module `name`, from the conversions that transformers loads them with."""
    conversions = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    stems = {kind: f"{name}.{kind}" for kind in ("gate_up_proj", "down_proj")}
    found: dict[str, list[str]] = {}
    for conversion in conversions:
        for kind, stem in stems.items():
            if not isinstance(conversion, WeightConverter) or not stem.endswith(conversion.target_patterns[0]):
                continue
            merges = [type(operation) for operation in conversion.operations]
            if merges not in ([MergeModulelist], [MergeModulelist, Concatenate]):
                raise ValueError(
                    f"the experts of model_type {model.config.model_type!r} are converted on loading by "
                    f"{', '.join(merge.__name__ for merge in merges)}; add a row with their layout to ktft's families"
                )
            start = stem.removesuffix(conversion.target_patterns[0])
            found[kind] = [start + source.removesuffix(".weight") for source in conversion._original_source_patterns]
    layer = f".{_layer_number(name)}."
    if not found:
        return Layout(f"{name.replace(layer, '.{layer}.', 1)}.{{projection}}", names=STACKED.names)
    stems_on_disk = [_on_disk(stem, conversions) for stem in (*found["gate_up_proj"], *found["down_proj"])]
    prefixes = {stem.rpartition(".")[0] for stem in stems_on_disk}
    if len(stems_on_disk) != len(PROJECTIONS) or len(prefixes) > 1:
        raise ValueError(f"cannot tell where checkpoints of {model.config.model_type!r} hold {name}; add a row")
    prefix = prefixes.pop().replace(layer, ".{layer}.", 1).replace(".*", ".{expert}", 1)
    gate, up, down = (stem.rpartition(".")[2] for stem in stems_on_disk)
    return Layout(f"{prefix}.{{projection}}", names=(gate, up, down))


def _on_disk(stem: str, conversions: list[Any]) -> str:
    for conversion in reversed(conversions):
        if isinstance(conversion, WeightRenaming):
            stem, _ = conversion.reverse_transform().rename_source_key(stem)
    return stem
