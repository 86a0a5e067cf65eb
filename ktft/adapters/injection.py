"""LoRA on ktft's experts whoever calls PEFT: `get_peft_model`, TRL's `peft_config`, `inject_adapter_in_model`.

All of PEFT's entry points end in `BaseTuner.inject_adapter`. PEFT lets a single `LoraConfig` name a class for modules
that PEFT does not know, but offers no way to do so for all configurations. Its `all-linear` and name matching see only
modules, while experts are stacked. So that one method is wrapped (`ktft/hosts/peft.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from peft.tuners.lora.model import LoraModel
from torch import nn

from ktft.adapters.linear import check_packed
from ktft.adapters.lora import EXPERT_TENSOR, KtftExpertsLora, check_options
from ktft.adapters.reach import check_method, reach_of, resolve
from ktft.adapters.several import check_name
from ktft.adapters.tensor_parallel import check_request, dividing
from ktft.config import PER_EXPERT, SHARED_OUTER
from ktft.lora import NOT_SHARED
from ktft.model.experts import KtftExperts, find_experts, first_experts

INSTEAD = {
    "add_adapter": "model = peft.get_peft_model(model, config)",
    "load_adapter": "model = peft.PeftModel.from_pretrained(model, path), or ktft.load_adapter(model, path)",
}
"""Method of transformers' models -> code that does the same for ktft's experts. `ktft/hosts` says why it is needed."""

_AS_SAVED = "_ktft_as_saved"


def as_saved(config: Any, form: str) -> Any:
    """Mark a configuration as that of a saved adapter: its targets are matched as they are, by PEFT's rule.

    `form` is the saved LoRA's on experts, one of `EXPERT_LORA`.
    """
    setattr(config, _AS_SAVED, form)
    return config


def inject_adapter(
    original: Callable[..., None], tuner: Any, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any
) -> None:
    """PEFT's `BaseTuner.inject_adapter`, which reaches ktft's experts too; other models pass through unchanged."""
    if first_experts(model) is None:
        return original(tuner, model, adapter_name, *args, **kwargs)
    config = tuner.peft_config[adapter_name]
    check_method(config)
    if not isinstance(tuner, LoraModel):
        raise ValueError(f"ktft's experts take adapters from PEFT's LoraModel, not {type(tuner).__name__}")
    if kwargs.get("state_dict") is not None:
        raise ValueError("ktft's experts take no LoRA from a state_dict's names; give target_modules")
    form = vars(config).pop(_AS_SAVED, None)
    if form is None:
        resolve(model, config)
        form = next(iter(find_experts(model).values())).expert_lora or PER_EXPERT
    check_request(model, config)
    check_packed(model, config)
    with _reaching_experts(model, config, adapter_name, form), dividing(model, adapter_name):
        return original(tuner, model, adapter_name, *args, **kwargs)


@contextmanager
def _reaching_experts(model: nn.Module, config: Any, adapter_name: str, form: str) -> Iterator[None]:
    """Make `config` also name ktft's modules and their layer class while PEFT puts layers into the model."""
    check_name(model, adapter_name)
    reach = reach_of(model, config)
    ranks = {model.get_submodule(name): own for name, own in reach.ranks.items()}
    if ranks:
        check_options(vars(config))  # before PEFT has changed any module
        _check_whole(model, form)

    def create(target: KtftExperts, name: str, **kwargs: Any) -> KtftExpertsLora:
        return KtftExpertsLora(target, name, ranks[target], form, **kwargs)

    for module, own in ranks.items():
        if isinstance(module, KtftExpertsLora):
            module.ranks[adapter_name], module.forms[adapter_name] = own, form
    own_modules = config._custom_modules and dict(config._custom_modules)
    config._register_custom_module({KtftExperts: create})
    config.target_modules = reach.modules
    try:
        yield
    finally:
        config.target_modules, config._custom_modules = reach.standard, own_modules


def _check_whole(model: nn.Module, form: str) -> None:
    """Refuse LoRA that all experts share in a process that does not hold all of them."""
    for name, module in find_experts(model).items():
        if form == SHARED_OUTER and not module.held.whole:
            held = module.held
            raise ValueError(
                NOT_SHARED.format(f"this process holds {held.count} of the {held.num_experts} experts of {name}")
            )


def keep_targets(original: Callable[..., None], peft_config: Any, model: nn.Module, *args: Any, **kwargs: Any) -> None:
    """PEFT's `convert_peft_config_for_transformers`, which leaves targets of models with ktft's experts as they are."""
    if first_experts(model) is None:
        original(peft_config, model, *args, **kwargs)


def keep_names(
    original: Callable[..., dict[str, Any]], model: nn.Module, peft_config: Any, adapter_state_dict: dict[str, Any],
    *args: Any, **kwargs: Any,
) -> dict[str, Any]:  # fmt: skip
    """PEFT's `convert_peft_adapter_state_dict_for_transformers`, which leaves names of ktft's experts as they are."""
    if first_experts(model) is not None:
        return adapter_state_dict
    return original(model, peft_config, adapter_state_dict, *args, **kwargs)


def name_adapter(
    original: Callable[..., dict[str, Any]], cls: type, model: nn.Module, config: Any, adapter_name: str,
    state_dict: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """PEFT's `BaseTuner._remap_adapter_state_dict_for_load`, which names the adapter in per-expert tensors too."""
    named = original(cls, model, config, adapter_name, state_dict)
    if first_experts(model) is None:
        return named
    return {EXPERT_TENSOR.sub(lambda end: f"{end[1]}.{adapter_name}{end[2]}", key): named[key] for key in named}


def refuse_method(original: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Refuse a method of transformers' models that `INSTEAD` names. Models without ktft's experts keep the original."""
    if first_experts(model) is not None:
        name = original.__name__
        raise ValueError(f"transformers' {name} cannot give ktft's experts LoRA; write {INSTEAD[name]}")
    return original(model, *args, **kwargs)
