"""LLaMA-Factory's `use_kt: true`, implemented by ktft. The only file that knows LLaMA-Factory.

The functions that `ktft/hosts/llamafactory.py` names are wrapped: the parser takes `kt_config` out of the arguments and
stores the settings on the parsed `ModelArguments`; the functions that load models act on models whose arguments have
such settings. Everything else passes through unchanged.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from peft.utils import ModulesToSaveWrapper
from transformers import TrainingArguments
from transformers.hf_argparser import string_to_bool
from transformers.integrations.fsdp import is_fsdp_enabled

from ktft import errors, hosts, native
from ktft.adapters.lora import UNMERGED
from ktft.adapters.peft import expert_layers
from ktft.adapters.reach import linear_names
from ktft.adapters.several import stand_on
from ktft.checkpoint.families import FAMILIES
from ktft.checkpoint.schemes import scheme_of
from ktft.config import PROJECTIONS, Settings
from ktft.dense.formats import PLAIN
from ktft.device import ACCELERATORS, accelerator
from ktft.hosts.llamafactory import PATCHES
from ktft.kt_keys import TOP_LEVEL_KEYS, parse_kt_config
from ktft.model.dense_linears import with_choice
from ktft.model.dense_memory import GPU, released_format
from ktft.model.experts import find_experts, first_experts
from ktft.model.fit import Room
from ktft.model.quantizer import check_flash_attention, configure
from ktft.ranks.launch import Launch
from ktft.system import available_memory, end_without_collections
from ktft.train.checkpoints import hold
from ktft.train.muon import take_stacked
from ktft.train.recipe import (
    Recipe,
    check_names,
    dense_choice,
    kt_mapping,
    recipe_of_arguments,
    training_fit,
    training_reserve,
)
from ktft.train.report import logger
from ktft.train.trainer import check_arguments, check_launch
from ktft.versions import FACTORY, require_stack

_SETTINGS = "_ktft_settings"
_RECIPE = "_ktft_recipe"
_HUB_ARGUMENTS = {
    "subfolder": "adapter_folder",
    "cache_dir": "cache_dir",
    "revision": "model_revision",
    "token": "hf_hub_token",
}


def settings_of(model_args: Any) -> Settings | None:
    """The experts' settings that came with these `ModelArguments`; None without `use_kt: true`."""
    return getattr(model_args, _SETTINGS, None)


# --- arguments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RefusedArgument:
    """Values of a LLaMA-Factory argument that ktft cannot honour, unless the argument `beside` is also set."""

    argument: str
    refused: Callable[[Any], bool]
    cure: str
    beside: str = ""


REFUSALS = (
    RefusedArgument("finetuning_type", lambda v: v != "lora", "set finetuning_type: lora"),
    RefusedArgument("stage", lambda v: v == "ppo", "use stage pt, sft, rm, dpo or kto"),
    RefusedArgument("quantization_bit", bool, "remove it; kt_config.expert_format sets the experts' format"),
    RefusedArgument("ref_model_quantization_bit", bool, "remove it; kt_config.expert_format sets the experts' format"),
    RefusedArgument("use_dora", bool, "use plain LoRA, or use_rslora"),
    RefusedArgument("pissa_init", bool, "use the default initialization; PiSSA needs unquantized weights"),
    RefusedArgument("use_llama_pro", bool, "remove it"),
    RefusedArgument("use_unsloth", bool, "remove it"),
    RefusedArgument("mixture_of_depths", bool, "remove it"),
    RefusedArgument("train_from_scratch", bool, "start from a checkpoint; ktft's experts stay frozen"),
    RefusedArgument("use_hyper_parallel", bool, "remove it"),
    RefusedArgument("use_adam_mini", bool, "remove it: it would give all experts of a layer one learning rate"),
    RefusedArgument(
        "use_asft_loss",
        bool,
        "name the reference model, ref_model: the value of model_name_or_path for instance: with LoRA LLaMA-Factory "
        "makes none by itself, and its ASFT crashes without one",
        beside="ref_model",
    ),
    RefusedArgument(
        "infer_backend",
        lambda v: v != "huggingface",
        "set infer_backend: huggingface, or serve the result with vLLM: ktft serve MODEL --adapter ADAPTER",
    ),
    RefusedArgument("export_dir", bool, UNMERGED),
)


def parse_args(
    original: Callable[..., tuple[Any, ...]], parser: Any, args: Any = None, allow_extra_keys: bool = False
) -> tuple[Any, ...]:
    """Parse LLaMA-Factory's arguments; with `use_kt: true`, check all of them and store ktft's settings on them."""
    module = importlib.import_module("llamafactory.hparams.parser")
    if module.ModelArguments not in parser.dataclass_types:
        return original(parser, args, allow_extra_keys)
    args = module.read_args(args if args is not None else _json_arguments(module))
    if any(name in str(key) for key in args for name in ("use_kt", "kt_config")) and _is_command():
        errors.install()
        end_without_collections()
    known = {field.name for field in fields(module.ModelArguments)}
    use_kt, kt_config, top_level, rest = _split(args, known)
    if not use_kt:
        if kt_config is not None:
            raise ValueError("kt_config is given without use_kt: true; add that, or remove kt_config")
        return original(parser, args, allow_extra_keys)
    for kind in ACCELERATORS.values():
        kind.prepare()
    _check_environment(module, rest)
    parsed = original(parser, rest, allow_extra_keys)
    for arguments in parsed:
        _check_values(arguments)
        check_names(arguments)
    model_args = next(arguments for arguments in parsed if isinstance(arguments, module.ModelArguments))
    top_level |= {key: getattr(model_args, key) for key in TOP_LEVEL_KEYS if key in known}
    settings, notes = parse_kt_config(kt_mapping(kt_config), top_level)
    for note in notes:
        logger().info(note)
    setattr(model_args, _SETTINGS, settings)
    setattr(model_args, _RECIPE, recipe_of_arguments(parsed, settings))
    training = next((each for each in parsed if isinstance(each, TrainingArguments)), None)
    if training is not None and training.fsdp_plugin_args is not None:
        model_args.use_reentrant_gc = False  # LLaMA-Factory does so if accelerate's launcher asks for FSDP2
    if training is not None and training.do_train:  # before LLaMA-Factory looks for checkpoints to resume from
        _RUNNING.enter_context(hold(training))
    # From here on LLaMA-Factory sees a quantized model with LoRA. Its own use_kt would require KTransformers' packages
    # and refuse what they cannot do.
    model_args.use_kt = False
    return parsed


def _split(args: Any, known: set[str]) -> tuple[bool, Any, dict[str, Any], Any]:
    """Split the arguments into (use_kt, kt_config, kt_* keys that LLaMA-Factory does not know, all others)."""
    if not isinstance(args, dict):
        ours = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        ours.add_argument("--use_kt", nargs="?", const=True, default=False, type=string_to_bool)
        # LLaMA Board prints a mapping as JSON without quotes: bash splits it into words that make up YAML
        ours.add_argument("--kt_config", nargs="+")
        found, rest = ours.parse_known_args(args)
        kt_config = found.kt_config and yaml.safe_load(" ".join(found.kt_config))
        return found.use_kt, kt_config, {}, [*rest, "--use_kt", str(found.use_kt)]
    ours_too = [key for key in args if key.startswith("kt_") and key not in known and key != "kt_config"]
    others = {key: value for key, value in args.items() if key != "kt_config" and key not in ours_too}
    return _truth(args.get("use_kt")), args.get("kt_config"), {key: args[key] for key in ours_too}, others


def _json_arguments(module: Any) -> Any:
    """Arguments from a JSON file and the rest of the command line; None if the command line names no such file.

    LLaMA-Factory 0.9.5 intends to read one, but passes its path to `json.load`, which raises an AttributeError.
    """
    if len(sys.argv) < 2 or not sys.argv[1].endswith(".json"):
        return None
    try:
        values = json.loads(Path(sys.argv[1]).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{sys.argv[1]} is not a JSON file: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{sys.argv[1]} holds no keys; give a JSON object of LLaMA-Factory's arguments")
    conf = module.OmegaConf
    return conf.to_container(conf.merge(conf.create(values), conf.from_cli(sys.argv[2:])))


def _is_command() -> bool:
    """Whether this process is LLaMA-Factory's own command rather than a program that calls LLaMA-Factory."""
    program = Path(sys.argv[0])
    return program.name in ("llamafactory-cli", "lmf") or program.parent.name == "llamafactory"


def _truth(use_kt: Any) -> bool:
    try:
        return use_kt is not None and string_to_bool(str(use_kt))
    except argparse.ArgumentTypeError:
        raise ValueError(f"use_kt is {use_kt!r}; give true or false") from None


def _check_environment(module: Any, args: Any) -> None:
    """Refuse what is known before transformers reads the arguments, which may start process groups and DeepSpeed."""
    require_stack((FACTORY,))
    if module.is_env_enabled("USE_MCA"):
        raise ValueError("use_kt: true does not work under USE_MCA; unset it")
    given = args if isinstance(args, dict) else {}
    try:
        check_launch(deepspeed=bool(given.get("deepspeed")))
    except ValueError as error:
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun shows it last, not 50 lines further up
            Path(file).write_text(json.dumps({"message": str(error)}))
        raise
    importlib.import_module("llamafactory.model")
    for patch in PATCHES:
        if patch.owner.startswith("llamafactory.model.") and patch not in hosts.installed():
            raise RuntimeError(
                f"ktft could not replace {patch.owner}.{patch.name}, so use_kt: true would load stock experts; run "
                "ktft doctor --patches"
            )


def _check_values(arguments: Any) -> None:
    for refusal in REFUSALS:
        value = getattr(arguments, refusal.argument, None)
        refused = hasattr(arguments, refusal.argument) and refusal.refused(value)
        if refused and not (refusal.beside and getattr(arguments, refusal.beside, None)):
            raise ValueError(f"{refusal.argument} is {value!r}, which use_kt: true does not support; {refusal.cure}")
    if getattr(arguments, "stage", None) == "rm" and (launch := Launch.of_environment()).ranks > 1:
        raise ValueError(
            f"stage is 'rm' in {launch.ranks} processes: LLaMA-Factory writes the value head from one process alone, "
            "which does not have the experts of the others; set CUDA_VISIBLE_DEVICES to one GPU"
        )
    if getattr(arguments, "flash_attn", None) == "fa2":
        check_flash_attention("flash_attn: fa2")
    if isinstance(arguments, TrainingArguments):
        check_arguments(arguments)


def copy_arguments(original: Callable[..., Any], cls: type, source: Any, **kwargs: Any) -> Any:
    """Copy the arguments for DPO's reference model, together with ktft's settings."""
    made, settings = original(cls, source, **kwargs), settings_of(source)
    if settings is not None and "model_name_or_path" in kwargs:
        settings = replace(settings, expert_checkpoint=None, expert_routing=None)  # of the source's model
    setattr(made, _SETTINGS, settings)
    return made


# --- models -----------------------------------------------------------------------------------------------------------


def configure_attention(original: Callable[..., None], config: Any, model_args: Any) -> None:
    """Keep transformers' default if LLaMA-Factory's choice of attention cannot be imported."""
    try:
        original(config, model_args)
    except ImportError as error:
        if settings_of(model_args) is None:
            raise
        logger().warning("attention is transformers' default: LLaMA-Factory's choice cannot be loaded (%s)", error)


def patch_config(
    original: Callable[..., None], config: Any, tokenizer: Any, model_args: Any, init_kwargs: dict[str, Any], *args: Any
) -> None:
    """Make the model of this config load its routed experts with ktft."""
    settings = settings_of(model_args)
    if settings is None:
        return original(config, tokenizer, model_args, init_kwargs, *args)
    _show_on_board()
    # LLaMA-Factory would require the packages of the checkpoint's own method, and give that method to the model.
    released = _released(config)
    vars(config).pop("quantization_config", None)
    original(config, tokenizer, model_args, init_kwargs, *args)
    configure(config, *_fitted(config, model_args, settings, released))
    if init_kwargs.get("device_map") == "auto":  # inference: it would spread the model over all GPUs
        misc = importlib.import_module("llamafactory.extras.misc")
        init_kwargs["device_map"] = {"": misc.get_current_device()}


def _show_on_board() -> None:
    """Write ktft's lines to the log on LLaMA Board's page, if that started this run."""
    shown = importlib.import_module("llamafactory.extras.logging").LoggerHandler
    for handler in logging.getLogger("llamafactory").handlers:
        if isinstance(handler, shown):
            logger().addHandler(handler)


def apply_liger_kernel(original: Callable[..., None], config: Any, model_args: Any, *args: Any, **kwargs: Any) -> None:
    """Use Liger's kernels for everything except the experts."""
    with _experts_kept(config) if settings_of(model_args) is not None else nullcontext():
        original(config, model_args, *args, **kwargs)


def resize_embedding_layer(original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
    """Resize the embedding layer like that of an unquantized model: only the experts are quantized."""
    if first_experts(model) is None:
        return original(model, *args, **kwargs)
    method, model.quantization_method = model.quantization_method, None
    try:
        original(model, *args, **kwargs)
    finally:
        model.quantization_method = method


def init_adapter(
    original: Callable[..., Any], config: Any, model: Any, model_args: Any, finetuning_args: Any, is_trainable: bool
) -> Any:
    """Put the adapters on the model: the last one as LLaMA-Factory does, the others frozen beneath it."""
    if settings_of(model_args) is None:
        return original(config, model, model_args, finetuning_args, is_trainable)
    # LLaMA-Factory would merge all adapters but the one being trained, and accepts only one on a quantized model.
    paths = list(model_args.adapter_name_or_path or ())
    top = [] if is_trainable and finetuning_args.create_new_adapter else paths[-1:]
    below = paths[: len(paths) - len(top)]
    own_args = copy.copy(model_args)
    own_args.adapter_name_or_path = top or None
    adapted = original(config, model, own_args, finetuning_args, is_trainable)
    if is_trainable:
        _check_precision(adapted, getattr(model_args, _RECIPE, None))
        _tell_of_balance(adapted, model_args.moe_aux_loss_coef)
    if below:
        stand_on(adapted, below, **{key: getattr(model_args, name) for key, name in _HUB_ARGUMENTS.items()})
        logger().info("applied frozen, beneath the adapter that %s: %s", "trains" if is_trainable else "is last", below)
    if not is_trainable:
        model._hf_peft_config_loaded = True  # lets a Trainer evaluate a quantized model that has no adapter
    return adapted


@contextmanager
def _experts_kept(config: Any) -> Iterator[None]:
    """Restore transformers' classes for routed experts afterwards; Liger replaces them with its own."""
    name = type(config).__module__.replace(".configuration_", ".modeling_")
    modeling = importlib.import_module(name)
    known = {each for family in FAMILIES.values() for each in family.experts_classes}
    before = {each: cls for each, cls in vars(modeling).items() if each in known or each.endswith("Experts")}
    yield
    for each, cls in before.items():
        setattr(modeling, each, cls)


def create_muon_optimizer(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Make Muon also update the LoRA of routed experts, which is three-dimensional and would otherwise go to AdamW."""
    optimizer = original(model, *args, **kwargs)
    layers = expert_layers(model).values()
    stacked = [t for layer in layers for name in layer.lora_A for _, _, t in layer.tensors(name) if t.requires_grad]
    if stacked:
        take_stacked(optimizer, stacked)
        count = sum(parameter.numel() for parameter in stacked)
        logger().info("Muon also updates %s parameters of LoRA on routed experts, each matrix by itself", f"{count:,}")
    return optimizer


def _tell_of_balance(model: Any, coefficient: float | None) -> None:
    """Warn if a balancing loss has no effect: LLaMA-Factory accepts one for any model, transformers has it for some."""
    if coefficient and all(getattr(each, "router_aux_loss_coef", None) != coefficient for each in model.modules()):
        logger().warning(
            "moe_aux_loss_coef: %g has no effect: transformers' code of %s has no loss that balances its experts; "
            "leave it out",
            coefficient,
            model.config.model_type,
        )


def _check_precision(model: Any, recipe: Recipe | None) -> None:
    """LLaMA-Factory trains additional_target modules in fp32, which works in a bf16 model only under autocast."""
    whole = any(isinstance(module, ModulesToSaveWrapper) for module in model.modules())
    if whole and recipe and not (recipe.bf16 or recipe.fp16 or recipe.pure_bf16) and model.dtype != torch.float32:
        also = "" if recipe.use_cpu or accelerator() is not None else " and use_cpu: true"
        raise ValueError(
            f"additional_target trains modules in fp32 within a model of {str(model.dtype).removeprefix('torch.')}; "
            f"set bf16: true{also}"
        )


def _released(config: Any) -> str | None:
    """The format that keeps the checkpoint's weights outside the experts as they are, beside the model's own dtype."""
    with suppress(ValueError):  # what cannot be read is refused with the file's name later
        return released_format(scheme_of(config.to_dict(), "config.json"))
    return None


def _fitted(
    config: Any, model_args: Any, settings: Settings, released: str | None
) -> tuple[Settings, int | dict[str, int]]:
    """The settings, with format and place of the dense weights chosen, and the bytes that training needs beside the
    model, in all or by purpose; 0 for models that are not trained.
    """
    recipe = getattr(model_args, _RECIPE, None)
    runtime, gpu = native.runtime_of(settings), None if recipe is not None and recipe.use_cpu else accelerator()
    free = gpu.free_bytes() if gpu is not None else None
    room = Room(free[0] if free else None, available_memory(), runtime.threads, runtime.nodes)
    if is_fsdp_enabled() and settings.dense_placement == "auto":  # it divides plain weights alone
        settings = replace(settings, dense_format=settings.dense_format or PLAIN, dense_placement=GPU)
        recipe = None if recipe is None else replace(recipe, settings=settings)
    if recipe is None:
        return with_choice(settings, dense_choice(config, settings, None, room, released=released)), 0
    fit = training_fit(config, recipe, room, released=released)
    return with_choice(settings, fit.work.dense), training_reserve(fit.need, gpu=gpu is not None)


def find_all_linear_modules(original: Callable[..., list[str]], model: Any, *args: Any, **kwargs: Any) -> list[str]:
    """The modules that `lora_target: all` means: LLaMA-Factory omits a frozen vision tower and does not see experts."""
    found = original(model, *args, **kwargs)
    if first_experts(model) is None:
        return found
    return sorted(name for name in linear_names(model) if name.rpartition(".")[2] in {*found, *PROJECTIONS})


def patch_target_modules(
    original: Callable[..., list[str]], model: Any, finetuning_args: Any, targets: list[str]
) -> list[str]:
    """Keep the experts among the targets of a vision-language model, which LLaMA-Factory expands to modules' names."""
    names, experts = original(model, finetuning_args, targets), find_experts(model)
    if names is targets or not experts.keys() & set(original(model, finetuning_args, ["experts"])):
        return names
    return [*names, *(target for target in targets if target in PROJECTIONS)]


_RUNNING = ExitStack()
"""The locks that a run holds from parsing its arguments to its end. If a caller only parses, the process holds them."""


def training_function(original: Callable[..., None], config: dict[str, Any]) -> None:
    """Run LLaMA-Factory's training, then release the locks that it held."""
    with _RUNNING:
        original(config)
