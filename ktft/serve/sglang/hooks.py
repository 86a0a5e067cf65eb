"""The functions that SGLang calls in place of its own, by its registry of hooks: those of `ktft.hosts.sglang.HOOKED`.

SGLang applies hooks after it has loaded all plugins, and only logs those that it cannot apply.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ktft.device import device_of
from ktft.hosts.sglang import HOOKED
from ktft.serve.runtime.hybrid_experts import HybridModel
from ktft.serve.runtime.served_model import current
from ktft.serve.sglang.adapter_names import AdapterNames
from ktft.serve.sglang.loader import SglangModelLoader
from ktft.serve.sglang.lora_manager import SglangLoraManager

STATUS = "ktft"
"""The key of `ktft.serve.runtime.served_model.ServedModel.status` in SGLang's internal state."""


def register() -> None:
    """Give SGLang all hooks."""
    for row in HOOKED:
        HookRegistry.register(f"{row.owner}.{row.name}", row.find_wrapper(), HookType.AROUND)


def require_applied() -> None:
    """Check that SGLang has applied all hooks: a process without one would compute something else.

    Raises:
        ValueError: this SGLang lacks what a hook is for; the message has the cure.
        RuntimeError: it has not applied one.
    """
    for row in HOOKED:
        row.find_owner()
        target = f"{row.owner}.{row.name}"
        if not hasattr(pkgutil.resolve_name(target), "__wrapped__"):
            raise RuntimeError(f"SGLang has not applied ktft's hook on {target}; its log above has the reason")


def get_model_loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """ktft's loader for a model of the quantization method `ktft`."""
    if model_config is not None and model_config.quantization == "ktft":
        return SglangModelLoader(load_config)
    return original(load_config, model_config)


def init_lora_manager(original: Callable[..., Any], runner: Any) -> None:
    """Give the runner ktft's manager, and leave the model as it is."""
    runner.lora_manager = SglangLoraManager(runner.model)


def init_lora(original: Callable[..., Any], manager: Any) -> None:
    """Give the tokenizer's manager ktft's registry of adapters."""
    original(manager)
    manager.lora_registry = AdapterNames()


def resolve_lora_path(original: Callable[..., Any], serving: Any, model: str, explicit: Any) -> str | None:
    """The adapter of a request: the name of its model, unless that is the base. The gate has checked it."""
    return model if model in serving.tokenizer_manager.lora_registry.get_all_adapters() else None


def forward_batch_generation(original: Callable[..., Any], worker: Any, *args: Any, **named: Any) -> Any:
    """A step of the model. On a GPU residents follow traffic before it, and no token gets out if its experts failed."""
    served = current()
    if not isinstance(served, HybridModel):
        return original(worker, *args, **named)
    served.between_steps()
    result = original(worker, *args, **named)
    device_of(served.device).synchronize()
    served.check()
    return result


def get_internal_state(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """SGLang's own, and ktft's status."""
    output = original(scheduler, request)
    output.internal_state[STATUS] = current().status()
    return output
