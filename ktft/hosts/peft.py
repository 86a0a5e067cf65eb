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
    *(
        Patch(
            "peft.tuners.tuners_utils.BaseTuner",
            name,
            "ktft.model.lockstep:after_all",
            "A micro-batch changes which adapters are in force, for DPO's reference, once all that go with it have "
            "come so far. PEFT tells nobody.",
        )
        for name in ("enable_adapter_layers", "disable_adapter_layers", "set_adapter")
    ),
    Patch(
        "peft.utils.transformers_weight_conversion",
        "convert_peft_config_for_transformers",
        "ktft.adapters.injection:keep_targets",
        "Targets keep the standard names of the experts' projections. PEFT turns them into parameters of fused experts "
        "for each model type whose experts transformers fuses, and asks no module.",
        since="0.19",
    ),
    Patch(
        "peft.utils.transformers_weight_conversion",
        "convert_peft_adapter_state_dict_for_transformers",
        "ktft.adapters.injection:keep_names",
        "Tensors of an adapter keep their per-expert names when they are loaded, for the same reason.",
        since="0.19",
    ),
    Patch(
        "peft.tuners.tuners_utils.BaseTuner",
        "_remap_adapter_state_dict_for_load",
        "ktft.adapters.injection:name_adapter",
        "Per-expert tensors get the name of the adapter that they are loaded as. PEFT names tensors by the model's "
        "own, which are stacked, and would leave these out.",
        since="0.21",
    ),
    Patch(
        "peft.tuners.lora.layer.LoraLayer",
        "_get_in_out_features",
        "ktft.adapters.tensor_parallel:whole_features",
        "LoRA on a projection that tensor parallelism divides is made whole, then divided. PEFT would give every rank "
        "the same values, and LoRA of the wrong size to projections whose outputs are gathered.",
        since="0.21.2",
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
