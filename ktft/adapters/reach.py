"""Determines which of a model's modules an adapter reaches, and with which rank."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer, _ExcludedModule, check_target_module_exists
from peft.utils import PeftType
from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND
from peft.utils.other import get_pattern_key
from torch import nn

from ktft.adapters.lora import Rank
from ktft.adapters.whole_modules import check_modules_to_save
from ktft.lora import MAX_RANK
from ktft.model.experts import KtftExperts, experts_family, find_experts, layer_of

_REGEX = set(r"\*+?()[]|^$")


def linear_names(model: Any) -> set[str]:
    """The last parts of the names of what LoRA can train: without the output layer and the family's `without_lora`.

    The last two parts where the last is the name of one of the latter too, or of a module that is not linear.
    """
    unused = set(experts_family(model).without_lora)
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    modules = _adaptable(model)
    paths = [n.split(".") for n, m in modules.items() if isinstance(m, nn.Linear) and m is not output]
    taken = {path[-1] for path in paths if unused & set(path)}
    taken |= {n.rpartition(".")[2] for n, m in modules.items() if not isinstance(m, nn.Linear)}
    names = {name: None for each in find_experts(model).values() for name in each.projections}
    trained = [path for path in paths if not unused & set(path)] + [["experts", name] for name in names]
    return {".".join(path[-2:]) if path[-1] in taken else path[-1] for path in trained}


def _adaptable(model: Any) -> dict[str, nn.Module]:
    """Module name -> module, without a LoRA wrapper, for every module that PEFT would consider."""
    found: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if not name or name.startswith(inside):
            continue
        if isinstance(module, BaseTunerLayer):
            inside += (f"{name}.",)
            module = module.get_base_layer()
        found[name] = module
    return found


def resolve(model: Any, config: Any) -> None:
    """Expand `target_modules`, as the user wrote them, to standard names in `config`.

    Raises ValueError if a target matches nothing, or a module that LoRA would not train.
    """
    if isinstance(config.target_modules, str) and config.target_modules.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND:
        config.target_modules = list(linear_names(model))
    elif config.target_modules and len(config.target_modules) == 1 and _REGEX & set(*config.target_modules):
        (config.target_modules,) = config.target_modules  # LLaMA-Factory turns any value into a list
    _check_request(model, config)
    if not isinstance(config.target_modules, str):
        config.target_modules = _spelled_out(model, config.target_modules)


def _spelled_out(model: Any, targets: Collection[str]) -> set[str]:
    """Expand targets such as `experts.down_proj`, one projection of the routed experts only, to standard names."""
    found = {name: each for name, each in _adaptable(model).items() if isinstance(each, KtftExperts)}
    spelled: set[str] = set()
    for target in targets:
        module, _, projection = target.rpartition(".")
        experts = [
            each.held.num_experts
            for name, each in found.items()
            if f".{name}".endswith(f".{module}") and module and projection in each.projections
        ]
        numbers = range(max(experts)) if experts else None
        spelled |= {target} if numbers is None else {f"{module}.{number}.{projection}" for number in numbers}
    return spelled


def _check_request(model: Any, config: Any) -> None:
    """Raise ValueError unless each requested name matches only modules on which LoRA would train."""
    modules = _adaptable(model)
    targets = config.target_modules
    standard = [
        f"{name}{number}.{projection}"
        for name, module in modules.items()
        if isinstance(module, KtftExperts)
        for number in ("", ".0")
        for projection in module.projections
    ]

    def known() -> str:
        return f"it has {', '.join(sorted(linear_names(model)))}, and experts for the routed experts alone"

    if not targets:
        raise ValueError(f"target_modules is {targets!r}: name what LoRA shall train in the model; {known()}")
    for target in [targets] if isinstance(targets, str) else sorted(targets):
        probe = LoraConfig(target_modules=target if isinstance(targets, str) else [target])
        matched = [name for name in (*modules, *standard) if check_target_module_exists(probe, name)]
        if not matched:
            raise ValueError(f"target_modules (lora_target) {target!r} matches nothing in the model; {known()}")
        family = experts_family(model)
        unused = [name for name in matched if set(family.without_lora) & set(name.split("."))]
        if unused:
            if others := {".".join(name.split(".")[-2:]) for name in matched if name not in unused} & linear_names(
                model
            ):
                raise ValueError(
                    f"target_modules (lora_target) {target!r} matches the module {unused[0]} too, whose forward would "
                    f"not use LoRA, so that it would never train; name {', '.join(sorted(others))} instead"
                )
            is_router = family.router in unused[0].split(".")
            what = "router" if is_router else "module"
            whole = f", or train it whole with additional_target (modules_to_save): {target}" if is_router else ""
            raise ValueError(
                f"target_modules (lora_target) {target!r} matches the {what} {unused[0]}, whose forward would not use "
                f"LoRA, so that it would never train; leave the {what} out{whole}"
            )


@dataclass(frozen=True)
class Reach:
    """Full names of the modules that get LoRA, the ranks on routed experts by module, and `target_modules` to save."""

    modules: set[str]
    ranks: dict[str, dict[str, Rank]]
    standard: set[str] | str


def planned_reach(model: Any, config: LoraConfig) -> Reach:
    """The modules to which `get_peft_model` would add LoRA to a model, which is left as it is; with the same errors."""
    resolve(model, config)
    return reach_of(model, config)


def check_method(config: Any) -> None:
    """Raise ValueError for a config that uses another PEFT method than LoRA, or LoRA on parameters."""
    if config.peft_type != PeftType.LORA:
        raise ValueError(
            f"ktft trains LoRA, not PEFT's {getattr(config.peft_type, 'value', config.peft_type)}; give a LoraConfig"
        )
    if config.target_parameters:
        raise ValueError(
            f"ktft trains LoRA on target_modules, not with target_parameters={config.target_parameters}, because its "
            "experts are no torch parameters; name experts or their projections in target_modules"
        )


def reach_of(model: Any, config: Any) -> Reach:
    """The modules on which an adapter with this config has LoRA. Raises ValueError if experts cannot have it."""
    check_method(config)
    if config.layers_to_transform is not None and not config.layers_pattern:
        config.layers_pattern = ["layers"]  # without it, PEFT mistakes an expert's number for its layer's
    modules: set[str] = set()
    ranks: dict[str, dict[str, Rank]] = {}
    direct: dict[str, KtftExperts] = {}
    adaptable = _adaptable(model)
    for name, module in adaptable.items():
        match = check_target_module_exists(config, name)
        if isinstance(module, KtftExperts):
            if match:
                direct[name] = module
            if not isinstance(match, _ExcludedModule) and (own := _expert_ranks(config, name, module, bool(match))):
                ranks[name] = own
        elif match:
            modules.add(name)
    if not modules and not ranks and (config.layers_to_transform is not None or config.exclude_modules):
        numbers = sorted({number for name in adaptable if (number := layer_of(name)) is not None})
        raise ValueError(
            f"target_modules match modules of the model, but none is left by layers_to_transform="
            f"{config.layers_to_transform}, layers_pattern={config.layers_pattern} and exclude_modules="
            f"{config.exclude_modules!r}; the layers are numbers {numbers[0]} to {numbers[-1]} of lists named layers"
        )
    check_modules_to_save(model, config, adaptable, modules)
    return Reach(modules | set(ranks), ranks, _standard_targets(config.target_modules, direct))


def _expert_ranks(config: Any, name: str, experts: KtftExperts, whole: bool) -> dict[str, Rank]:
    """Projection -> rank, for the projections of one layer's experts that the config targets."""
    ranks: dict[str, Rank] = {}
    count = experts.held.num_experts if _tells_experts_apart(config) else 1
    for projection in experts.projections:
        keys = [f"{name}.{expert}.{projection}" for expert in range(count)]
        targeted = [key for key in keys if whole or check_target_module_exists(config, key)]
        if not targeted:
            continue
        if len(targeted) < len(keys):
            raise ValueError(
                f"target_modules match {projection} of {len(targeted)} of the {len(keys)} experts of {name}; ktft "
                "trains all experts of a layer or none"
            )
        found = {rank_of(config, key) for key in keys}
        if len(found) > 1:
            raise ValueError(f"rank_pattern or alpha_pattern differ between experts of {name}: {found}")
        ranks[projection] = found.pop()
        if not 1 <= ranks[projection].r <= MAX_RANK:
            raise ValueError(
                f"the LoRA rank of {projection} on the routed experts {name} is {ranks[projection].r}; it must be 1 to "
                f"{MAX_RANK}; set lora_rank, or rank_pattern where only other modules shall have more"
            )
    for pattern in (*config.rank_pattern, *config.alpha_pattern):
        if get_pattern_key([pattern], name) == pattern != name:
            raise ValueError(f"the pattern {pattern!r} matches {name}; name its projections instead, as in 'down_proj'")
    return ranks


def _tells_experts_apart(config: Any) -> bool:
    """Whether the config could treat an expert of a layer unlike another: only patterns, and names with numbers, can.

    A large model has ten thousands of experts' projections, which would be asked for one by one.
    """
    if isinstance(config.target_modules, str) or config.layers_to_transform is not None:
        return True
    if config.exclude_modules or config.modules_to_save or config.rank_pattern or config.alpha_pattern:
        return True
    return any(part.isdigit() for target in config.target_modules for part in target.split("."))


def rank_of(config: Any, module: str) -> Rank:
    """The rank and alpha that PEFT's rule gives to the module with this name."""
    return Rank(
        config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), module), config.r),
        config.alpha_pattern.get(get_pattern_key(list(config.alpha_pattern), module), config.lora_alpha),
    )


def _standard_targets(targets: set[str] | str, direct: dict[str, KtftExperts]) -> set[str] | str:
    """`target_modules` that other software can read: `experts`, a module only in ktft, is expanded to each expert."""
    if not direct:
        return targets
    projections = {name: None for each in direct.values() for name in each.projections}
    if isinstance(targets, str):
        return rf"(?:{targets})|(?:{targets})\.\d+\.(?:{'|'.join(projections)})"
    standard: set[str] = set()
    for target in targets:
        counts = {each.held.num_experts for name, each in direct.items() if f".{name}".endswith(f".{target}")}
        standard |= {f"{target}.{e}.{p}" for e in range(max(counts)) for p in projections} if counts else {target}
    return standard
