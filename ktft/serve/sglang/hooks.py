"""What ktft stands in for in SGLang, through SGLang's own registry of hooks.

SGLang applies the hooks after it has loaded all plugins, and logs each. A hook whose target is missing would only be
logged too, so `require_applied` raises where a process relies on them.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ktft.serve.runtime.served_model import current
from ktft.serve.sglang.adapter_names import AdapterNames
from ktft.serve.sglang.loader import KtftModelLoader
from ktft.serve.sglang.lora_manager import StepLoraManager
from ktft.versions import TESTED_SERVERS

GET_MODEL_LOADER = "sglang.srt.model_loader.loader.get_model_loader"
LORA_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
LORA_REGISTRY = "sglang.srt.lora.lora_registry.LoRARegistry"
RESOLVE_LORA_PATH = "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._resolve_lora_path"
INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
STATUS = "ktft"
"""The key of `ktft.serve.runtime.served_model.ServedModel.status` in SGLang's internal state."""


def _loader(original: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """SGLang has a fixed list of loaders; a model of the method `ktft` gets ktft's."""
    if model_config is not None and model_config.quantization == "ktft":
        return KtftModelLoader(load_config)
    return original(load_config, model_config)


def _adapter_of(serving: Any, model: str, explicit: Any) -> str | None:
    """The name of a request's model alone says which adapter computes it; that name has passed ktft's gate."""
    return model if model in serving.tokenizer_manager.lora_registry.get_all_adapters() else None


def _with_status(output: Any, *_: Any) -> Any:
    output.internal_state[STATUS] = current().status()
    return output


HOOKS: dict[str, tuple[Any, HookType]] = {
    GET_MODEL_LOADER: (_loader, HookType.AROUND),
    LORA_MANAGER: (StepLoraManager, HookType.REPLACE),
    LORA_REGISTRY: (AdapterNames, HookType.REPLACE),
    RESOLVE_LORA_PATH: (_adapter_of, HookType.REPLACE),
    INTERNAL_STATE: (_with_status, HookType.AFTER),
}
"""What is hooked, by SGLang's name."""


def register() -> None:
    """Register all hooks with SGLang, which applies them."""
    for target, (hook, kind) in HOOKS.items():
        HookRegistry.register(target, hook, kind)


def require_applied() -> None:
    """Raise RuntimeError if SGLang has not applied one of the hooks. A server without it would compute other things."""
    for target, (hook, _) in HOOKS.items():
        found = pkgutil.resolve_name(target)
        if found is not hook and not hasattr(found, "__wrapped__"):
            raise RuntimeError(
                f"SGLang did not apply ktft's hook on {target}; its log has the reason. ktft was tested with SGLang "
                f"{' to below '.join(TESTED_SERVERS['sglang'])}"
            )
