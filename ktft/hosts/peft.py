"""What ktft replaces in peft. The layer class for ktft's experts is registered in each configuration."""

from __future__ import annotations

from ktft.hosts.patch import Patch

PATCHES = (
    Patch(
        "peft.tuners.tuners_utils.BaseTuner",
        "inject_adapter",
        "ktft.adapters.injection:inject_adapter",
        "All of PEFT's ways to put LoRA on a model end here. One LoraConfig can register a class for unknown modules, "
        "which is done here; there is no registry for all configurations, and no name of a module matches one expert.",
    ),
    Patch(
        "peft.peft_model.PeftModel",
        "__init__",
        "ktft.adapters.peft:init_peft_model",
        "A PeftModel on ktft's experts gets a class that saves and loads per-expert names. PEFT chooses the class by "
        "the task alone.",
    ),
    Patch(
        "peft.peft_model.PeftModel",
        "from_pretrained",
        "ktft.adapters.peft:from_pretrained",
        "Every tensor of a saved adapter must be there and fit. PEFT ignores what is left over and only warns of what "
        "is missing.",
    ),
)
"""Installed for the whole process, just before the first model with ktft's experts is made."""

LINEAR = Patch(
    "peft.tuners.lora.layer.Linear",
    "forward",
    "ktft.adapters.linear:forward",
    "While a run trains, a layer takes fewer kernels and no casts. A class given to _register_custom_module would stay "
    "after the run, and would take quantized layers from PEFT's own classes.",
    on_instances=True,
)
OTHERS = (LINEAR,)
"""Put on single objects."""
