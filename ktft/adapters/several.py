"""Several adapters on one model: the rules for those active together, and adapters that are part of the base model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from peft.tuners.lora.layer import LoraLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import nn

from ktft.adapters.below import describe
from ktft.adapters.files import local_directory
from ktft.adapters.lora import KtftExpertsLora

if TYPE_CHECKING:
    from peft import PeftModel as _Base  # the class that the mixin extends
else:
    _Base = object


class SeveralAdapters(_Base):
    """A mixin that changes how a `PeftModel` with expert LoRA handles several adapters."""

    base_adapters: dict[str, dict[str, Any]]
    """Adapters that count as part of the base model (see `stand_on`): name -> the record of `ktft.adapters.below`."""

    def set_adapter(self, adapter_name: str | list[str]) -> None:
        """Activate and unfreeze one adapter, or several whose LoRA is summed. Trainer saves and resumes the first.

        Raises ValueError if an adapter does not exist, or several of them hold the same module whole.
        """
        given = [adapter_name] if isinstance(adapter_name, str) else adapter_name
        names = [*(name for name in given if name not in self.base_adapters), *self.base_adapters]
        for name in names:
            super().set_adapter(name)  # raises for an unknown name
        check_whole_modules(self, names)
        self.active_adapter = names[0]
        self.base_model.set_adapter(names)
        self.set_requires_grad(list(self.base_adapters), False)
        freeze_originals(self)

    def delete_adapter(self, adapter_name: str) -> None:
        """Delete an adapter. The adapters beneath it do not change."""
        super().delete_adapter(adapter_name)
        self.base_adapters.pop(adapter_name, None)
        self.set_requires_grad(list(self.base_adapters), False)
        freeze_originals(self)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Disable all adapters but those that are part of the base model. `requires_grad` is restored afterwards."""
        with trainability_kept(self):
            if not self.base_adapters:
                with super().disable_adapter():
                    yield
                return
            active = list(self.active_adapters)
            self.base_model.set_adapter(list(self.base_adapters))
            try:
                yield
            finally:
                self.base_model.set_adapter(active)

    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("adapter_names") is not None:
            raise ValueError(
                "ktft has no batches that mix adapters (adapter_names); activate one or several with "
                "model.set_adapter, and run a batch for each"
            )
        return super()._enable_peft_forward_hooks(*args, **kwargs)


def stand_on(model: Any, paths: Sequence[str | os.PathLike[str]], **hub: Any) -> None:
    """Apply saved adapters beneath the active one, frozen and without dropout, as if merged into the base model.

    Only the active adapter is trained and saved by `save_pretrained`; `disable_adapter()` leaves the others on.

    Args:
        paths: adapter directories, or repositories on the Hugging Face Hub, in the order in which they were trained.
        hub: the Hub options of `ktft.load_adapter`.

    Raises:
        ValueError: an error of `ktft.load_adapter`; or the adapters cannot be applied together, because several hold
            the same module whole, their ranks add up to more than `MAX_RANK`, or the active one has dropout.
    """
    top, training = list(model.active_adapters), model.training
    for path in paths:
        name = f"base_{len(model.base_adapters) + 1}"
        model.load_adapter(path, name, **hub)
        model.base_adapters[name] = describe(str(path), local_directory(path, **hub))
        for module in model.modules():
            if isinstance(module, LoraLayer) and name in module.lora_dropout:
                module.lora_dropout[name] = nn.Dropout(0.0)
    model.train(training)
    with trainability_kept(model):
        model.set_adapter(top)
    for module in model.modules():
        if isinstance(module, KtftExpertsLora):
            module.check_together(module.applied(), training=True)


def check_name(model: nn.Module, adapter_name: str) -> None:
    """Refuse a name that occurs in other parameters' names: PEFT finds an adapter's parameters by that substring."""
    adapters = {n for module in model.modules() if isinstance(module, LoraLayer) for n in module.lora_A}
    if any(adapter_name != other and (adapter_name in other or other in adapter_name) for other in adapters):
        raise ValueError(f"adapter name {adapter_name!r} is part of {sorted(adapters)} or holds one; choose another")
    names = (name for name, _ in model.named_parameters())
    found = next((name for name in names if adapter_name in name and adapter_name not in name.split(".")), None)
    if not adapter_name or "." in adapter_name or found:
        raise ValueError(f"adapter name {adapter_name!r} occurs in {found}; choose another, without dots")


def check_whole_modules(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse adapters if two of them hold the same module whole, because whole modules cannot be summed."""
    for module_name, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            owners = [name for name in names if name in module.modules_to_save]
            if len(owners) > 1:
                raise ValueError(
                    f"adapters {' and '.join(owners)} both hold {module_name} whole (additional_target, "
                    "modules_to_save), so that they cannot be active together; merge the first into the base model "
                    "with ktft merge BASE ADAPTER OUT, and go on from OUT"
                )


def freeze_originals(model: nn.Module) -> None:
    """Freeze the base model's own copies again: PEFT unfreezes one if only inactive adapters hold its module whole."""
    for module in model.modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            module.original_module.requires_grad_(False)


@contextmanager
def trainability_kept(model: nn.Module) -> Iterator[None]:
    """Restore every parameter's `requires_grad` at the end of the block, because PEFT unfreezes active adapters."""
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        yield
    finally:
        for parameter, requires_grad in before.items():
            parameter.requires_grad_(requires_grad)


def base_adapters_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The `base_adapters` of a model, no matter how the model is wrapped."""
    found = (getattr(module, "base_adapters", None) for module in model.modules())
    return cast(dict[str, dict[str, Any]], next((adapters for adapters in found if adapters is not None), {}))


def check_resumed(model: nn.Module) -> None:
    """Raise ValueError if a model has several adapters above its base: transformers resumes only one of them."""
    below = base_adapters_of(model)
    adapters = [name for name in getattr(model, "peft_config", {}) if name not in below]
    if len(adapters) > 1:
        raise ValueError(
            f"transformers resumes one adapter, the model has {len(adapters)}: {', '.join(adapters)}; delete all but "
            "the one that trains (model.delete_adapter), and put frozen ones beneath it with stand_on"
        )
