"""What ktft replaces in LLaMA-Factory, which has no plugins: functions that its modules look up in their own globals.

`ktft_autoload` calls `adapt` with each module right after its import. Without `use_kt: true` every function does what
it did.
"""

from __future__ import annotations

from types import ModuleType

from ktft.hosts.patch import Patch, install

PATCHES = (
    Patch(
        "llamafactory.hparams.parser",
        "_parse_args",
        "ktft.train.llamafactory:parse_args",
        "It takes kt_config out of the arguments, checks the others, and keeps the settings with the ModelArguments.",
    ),
    Patch(
        "llamafactory.hparams.parser.ModelArguments",
        "copyfrom",
        "ktft.train.llamafactory:copy_arguments",
        "DPO loads its reference model with a copy of the arguments, which gets the settings too.",
    ),
    Patch(
        "llamafactory.model.loader",
        "patch_config",
        "ktft.train.llamafactory:patch_config",
        "It makes from_pretrained load the routed experts with ktft.",
    ),
    Patch(
        "llamafactory.model.loader",
        "init_adapter",
        "ktft.train.llamafactory:init_adapter",
        "Several adapters stand on each other. LLaMA-Factory would merge all but the last.",
    ),
    Patch(
        "llamafactory.model.loader",
        "apply_liger_kernel",
        "ktft.train.llamafactory:apply_liger_kernel",
        "Liger's norms, rotation and loss are used, but not its experts.",
    ),
    Patch(
        "llamafactory.model.patcher",
        "configure_attn_implementation",
        "ktft.train.llamafactory:configure_attention",
        "For gpt-oss LLaMA-Factory 0.9.5 imports a function that transformers 5.6 no longer has.",
    ),
    Patch(
        "llamafactory.model.patcher",
        "resize_embedding_layer",
        "ktft.train.llamafactory:resize_embedding_layer",
        "LLaMA-Factory refuses to resize quantized models, but here only the experts are quantized.",
    ),
    Patch(
        "llamafactory.model.adapter",
        "find_all_linear_modules",
        "ktft.train.llamafactory:find_all_linear_modules",
        "lora_target: all includes the routed experts, which are not linear modules.",
    ),
    Patch(
        "llamafactory.model.adapter",
        "patch_target_modules",
        "ktft.train.llamafactory:patch_target_modules",
        "Targets of a model that sees images become names of modules, which the projections of experts do not have.",
    ),
    Patch(
        "llamafactory.train.trainer_utils",
        "_create_muon_optimizer",
        "ktft.train.llamafactory:create_muon_optimizer",
        "Muon updates the LoRA of routed experts too. It is three-dimensional, and AdamW would get it.",
    ),
    Patch(
        "llamafactory.train.tuner",
        "_training_function",
        "ktft.train.llamafactory:training_function",
        "The lock on output_dir, taken when the arguments are parsed, is released when the run ends.",
    ),
)
"""Installed for the whole process, each when LLaMA-Factory imports its module."""


def adapt(module: ModuleType) -> None:
    """Install the rows of a module of `ktft_autoload.MODULES`. Raises ValueError if this LLaMA-Factory lacks a name."""
    name = module.__name__
    install([patch for patch in PATCHES if patch.owner == name or patch.owner.startswith(f"{name}.")])
