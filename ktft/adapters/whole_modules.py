"""Modules that an adapter trains and holds whole: PEFT's `modules_to_save`, LLaMA-Factory's `additional_target`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ktft.model.experts import KtftExperts, experts_family


def check_modules_to_save(model: Any, config: Any, modules: Mapping[str, nn.Module], lora: Collection[str]) -> None:
    """Each name in `config.modules_to_save` must match, by PEFT's rule, and match only what can be trained whole.

    Args:
        model: with ktft's experts.
        config: the adapter's.
        modules: all modules by name, without LoRA around them.
        lora: names of those that get LoRA.

    Raises:
        ValueError: it matches nothing, routed experts or a module around them, a module to which no gradient comes, or
            one that gets LoRA too.
    """
    family = experts_family(model)
    experts = [name for name, module in modules.items() if isinstance(module, KtftExperts)]
    no_gradient = set(family.without_lora) - {family.router}
    for target in config.modules_to_save or ():
        said = f"additional_target (modules_to_save) {target!r}"
        matched = [name for name in modules if name.endswith(target)]  # PEFT's rule: any end of the name
        if not matched:
            raise ValueError(f"{said} matches nothing in the model; name modules, such as {family.router} or lm_head")
        for name in matched:
            if any(f"{expert}.".startswith(f"{name}.") for expert in experts):
                raise ValueError(
                    f"{said} matches {name}, which {'is' if name in experts else 'holds'} routed experts: they are "
                    "quantized and stay frozen; train them with lora_target, and name smaller modules here"
                )
            if no_gradient & set(name.split(".")):
                raise ValueError(f"{said} matches {name}, to which no gradient comes; leave it out")
            if name in lora:
                raise ValueError(
                    f"{said} matches {name}, which lora_target gives LoRA; leave it out of lora_target, or write more "
                    f"of the name, such as {'.'.join(matched[0].split('.')[-2:])!r}"
                )
