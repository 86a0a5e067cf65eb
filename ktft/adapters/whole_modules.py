"""Modules that an adapter trains and holds whole: PEFT's `modules_to_save`, LLaMA-Factory's `additional_target`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from peft.utils import ModulesToSaveWrapper
from safetensors import safe_open
from torch import nn

from ktft.model.experts import KtftExperts, experts_family

_HEADS = {"SEQ_CLS": ("classifier", "score"), "TOKEN_CLS": ("classifier", "score")}
"""PEFT's task -> the names that PEFT adds to `modules_to_save` by itself, of which a model has one."""


def check_modules_to_save(model: Any, config: Any, modules: Mapping[str, nn.Module], lora: Collection[str]) -> None:
    """Each name in `config.modules_to_save` must match, by PEFT's rule, and match only what can be trained whole.

    Args:
        modules: all modules by name, without LoRA around them.
        lora: names of the modules that get LoRA.

    Raises:
        ValueError: it matches nothing, routed experts or a module around them, a module to which no gradient comes,
            one that gets LoRA too, or one that only ends like the name.
    """
    family = experts_family(model)
    experts = [name for name, module in modules.items() if isinstance(module, KtftExperts)]
    no_gradient = set(family.without_lora) - {family.router}
    for target in config.modules_to_save or ():
        said = f"additional_target (modules_to_save) {target!r}"
        matched = [name for name in modules if name.endswith(target)]  # PEFT's rule: any end of the name
        if not matched and target in _HEADS.get(getattr(config.task_type, "value", config.task_type), ()):
            continue
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
            if not any(f".{name}".endswith(f".{other}") for other in config.modules_to_save):
                raise ValueError(
                    f"{said} matches {name} too, since PEFT looks at any end of a name; write more of the name that "
                    f"is meant, or name {name.rpartition('.')[2]} as well"
                )
            if name in lora:
                raise ValueError(f"{said} matches {name}, which lora_target gives LoRA; leave it out of one of them")


def take_precision(model: nn.Module, adapter_name: str, file: Path) -> None:
    """Give modules held whole the dtype and values of an adapter file: those of a bf16 model may be trained in fp32."""
    with safe_open(file, framework="pt", device="cpu") as tensors:
        for name, module in model.named_modules():
            if isinstance(module, ModulesToSaveWrapper) and adapter_name in module.modules_to_save:
                for part, parameter in module.modules_to_save[adapter_name].named_parameters():
                    parameter.data = tensors.get_tensor(f"{name}.{part}").to(parameter.device)
