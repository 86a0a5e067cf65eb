"""Turns LLaMA-Factory's training keys, from a YAML file or its parsed arguments, into a workload for the planner."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedConfig

from ktft.adapters.reach import linear_names, planned_reach
from ktft.checkpoint.hub import require_found
from ktft.config import DEFAULT_EXPERT_FORMAT, Settings, emulate_gpu, other_hub
from ktft.dense.formats import PLAIN
from ktft.kt_keys import TOP_LEVEL_KEYS, parse_kt_config
from ktft.model.dense_memory import GPU, DenseChoice, dense_tiers, loaded_choice
from ktft.model.fit import Fit, Room, fit
from ktft.model.memory import Footprint
from ktft.model.shape import ModelShape, shape_of
from ktft.model.shortage import PACKED, WEIGHTS, by_cause
from ktft.model.workload import BF16, FP32, Adapter, PlannedAdapters, Workload, expert_adapters

# Sequences that a stage runs together for each row of the batch: chosen and rejected, or a row and its KL pair.
SEQUENCES = {"pt": 1, "sft": 1, "rm": 2, "dpo": 2, "kto": 2}
CHUNKED_STAGES = ("pt", "sft")
"""Stages whose loss needs the logits of some tokens at a time; others compare those of whole sequences."""
# Moments per parameter, in the parameter's precision. The first row whose key begins the optimizer's name counts.
OPTIMIZER_STATES = {
    "adamw_8bit": 0.5,
    "adamw_bnb_8bit": 0.5,
    "paged_adamw_8bit": 0.5,
    "adafactor": 0.0,
    "sgd": 0.0,
    "adagrad": 1.0,
    "rmsprop": 1.0,
    "lion": 1.0,
    "": 2.0,
}


@dataclass(frozen=True)
class Recipe:
    """LLaMA-Factory's keys with their defaults, and `kt_config` as settings. Raises ValueError as training would."""

    stage: str = "sft"
    finetuning_type: str = "lora"
    lora_rank: int = 8
    lora_target: str = "all"
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    cutoff_len: int = 2048
    disable_gradient_checkpointing: bool = False
    bf16: bool = False
    fp16: bool = False
    pure_bf16: bool = False
    optim: str = "adamw_torch_fused"
    use_cpu: bool = False
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "int" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{each.name} is {value!r}; give a whole number of at least 1")
            if each.type == "bool" and not isinstance(value, bool):
                raise ValueError(f"{each.name} is {value!r}; give true or false")
        if self.stage not in SEQUENCES:
            raise ValueError(f"stage is {self.stage!r}; ktft trains {', '.join(SEQUENCES)}")
        if self.finetuning_type != "lora":
            raise ValueError(f"finetuning_type is {self.finetuning_type!r}; ktft trains lora")
        if self.use_cpu and self.settings.needs_gpu and not emulate_gpu():
            raise ValueError(f"use_cpu is true, but {self.settings.needs_gpu}, which needs a GPU; remove one of them")

    def workload(self, adapters: PlannedAdapters, weight_bytes: int) -> Workload:
        """The work of one step with these adapters. Each weight outside the experts takes `weight_bytes` bytes."""
        return Workload(
            adapters=adapters,
            batch=self.per_device_train_batch_size * SEQUENCES[self.stage],
            sequence=self.cutoff_len,
            accumulation=self.gradient_accumulation_steps,
            checkpointing=not self.disable_gradient_checkpointing,
            activation=self.settings.activation,
            placement=self.settings.placement,
            gpu_expert_memory=self.settings.gpu_expert_memory,
            gpu_activation_memory=self.settings.gpu_activation_memory,
            states=next(n for name, n in OPTIMIZER_STATES.items() if self.optim.startswith(name)),
            weight_bytes=weight_bytes,
            mixed=(self.bf16 or self.fp16) and not self.pure_bf16,
            chunked_loss=self.stage in CHUNKED_STAGES,
            cuda_graphs=self.settings.cuda_graphs,
            deferred=self.optim.startswith("adamw_torch"),
        )

    def adapters(self, shape: ModelShape, model: nn.Module) -> PlannedAdapters:
        """All LoRA that training would add to a model whose experts are empty `KtftExperts`.

        Raises ValueError if lora_target matches nothing, or the router, or only some experts.
        """
        names = [name.strip() for name in self.lora_target.split(",")]
        targets = sorted(linear_names(model)) if names == ["all"] else names
        reach = planned_reach(model, LoraConfig(r=self.lora_rank, target_modules=targets))
        ranks: dict[int, dict[str, int]] = {}
        for name, own in reach.ranks.items():
            number = re.search(r"\blayers\.(\d+)\.", name)
            assert number is not None, name
            ranks[int(number[1])] = {projection: rank.r for projection, rank in own.items()}
        others = (
            Adapter(linear.in_features, linear.out_features, self.lora_rank, layer=linear.layer)
            for linear in shape.linears
            if linear.name in reach.modules
        )
        return PlannedAdapters((*expert_adapters(shape.moe, ranks, self.settings.expert_lora), *others))


def read_recipe(path: Path | None) -> tuple[Recipe, list[str]]:
    """The recipe of a training YAML, or LLaMA-Factory's defaults, and notes on kt_config.

    Raises ValueError if it is no YAML mapping, a key of kt_config is unknown, or training would refuse a value.
    """
    if path is None:
        return Recipe(), []
    try:
        values = yaml.safe_load(path.read_bytes())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} is not a YAML file: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no keys; give the YAML file that llamafactory-cli train takes")
    try:
        return recipe_of(values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def recipe_of(values: Mapping[str, Any]) -> tuple[Recipe, list[str]]:
    """The recipe of LLaMA-Factory's keys, and notes on kt_config. Other keys are ignored."""
    top_level = {key: value for key, value in values.items() if key.startswith("kt_") and key != "kt_config"}
    top_level = {key: value for key, value in top_level.items() if key not in TOP_LEVEL_KEYS or value is not None}
    settings, notes = parse_kt_config(kt_mapping(values.get("kt_config") or None), top_level)
    return _from_keys(values, settings), notes


def kt_mapping(kt_config: Any) -> Mapping[str, Any]:
    """The mapping that `kt_config` gives: it may be empty, a mapping, or the path of a JSON or YAML file with one."""
    if isinstance(kt_config, str) and Path(kt_config).is_file():
        kt_config = yaml.safe_load(Path(kt_config).read_bytes())
    if not isinstance(kt_config, Mapping | None):
        raise ValueError(f"kt_config is {kt_config!r}; give a mapping, or the path of a file that holds one")
    return kt_config or {}


def _from_keys(values: Mapping[str, Any], settings: Settings) -> Recipe:
    names = [each.name for each in fields(Recipe) if each.name != "settings"]
    chosen = {name: values[name] for name in names if values.get(name) is not None}
    target = chosen.get("lora_target")
    if isinstance(target, list | tuple):  # LLaMA-Factory splits it while parsing
        chosen["lora_target"] = ",".join(target)
    if "optim" in chosen:
        chosen["optim"] = str(getattr(chosen["optim"], "value", chosen["optim"]))
    return Recipe(**chosen, settings=settings)


def recipe_of_arguments(arguments: tuple[Any, ...], settings: Settings) -> Recipe | None:
    """The recipe of LLaMA-Factory's parsed arguments; None when they do not train."""
    values: dict[str, Any] = {}
    for each in arguments:
        values |= vars(each)
    return _from_keys(values, settings) if values.get("do_train") else None


NAMES = {
    "model_name_or_path": "config.json",
    "ref_model": "config.json",
    "adapter_name_or_path": "adapter_config.json",
    "ref_model_adapters": "adapter_config.json",
}
"""Arguments that name directories or repositories of the hub, and the file that each of these has."""


def check_names(arguments: Any) -> None:
    """Refuse names of models and adapters that do not exist, as `require_found` does, before anything is loaded."""
    if other_hub():  # LLaMA-Factory downloads from another hub itself
        return
    for argument, file in NAMES.items():
        names = getattr(arguments, argument, None) or ()
        for name in (names,) if isinstance(names, str) else names:
            require_found(argument, name, file, getattr(arguments, "cache_dir", None))


def weight_bytes_of(config: PreTrainedConfig) -> int:
    """Bytes of one weight outside the experts, in the checkpoint's precision; quantized weights become bf16."""
    return FP32 if getattr(config, "dtype", None) in (torch.float32, "float32") else BF16


def training_fit(
    config: PreTrainedConfig, recipe: Recipe, room: Room, *, released: str | None = None, ranks: int = 1
) -> Fit:
    """How a training fits in a machine's memory, known before the model is loaded.

    `fit.work.dense` is the choice of `dense_format` and `dense_placement` that the recipe leaves open, `fit.work.away`
    whether activations wait in host memory, `fit.work.together` how many micro-batches go together.

    Args:
        config: the model's; its `quantization_config` may be gone.
        room: its `gpu_bytes` is None without a GPU; `kt_config.gpu_memory` caps it.
        released: as in `ktft.model.dense_memory.dense_tiers`.
        ranks: how many processes share the experts.
    """
    settings = recipe.settings
    shape, model = shape_of(config, ranks=ranks)
    work = replace(recipe.workload(recipe.adapters(shape, model), weight_bytes_of(config)), ranks=ranks)
    if room.gpu_bytes is not None:
        room = replace(room, gpu_bytes=settings.capped(room.gpu_bytes))
    expert_format = settings.expert_format or DEFAULT_EXPERT_FORMAT
    tiers = dense_tiers(settings, released)
    return fit(shape, work, expert_format, room, tiers, settings.micro_batches_together)


def dense_choice(
    config: PreTrainedConfig,
    settings: Settings,
    recipe: Recipe | None,
    room: Room,
    *,
    released: str | None = None,
    ranks: int = 1,
) -> DenseChoice:
    """The format and placement of the weights outside the experts, where the settings leave them open.

    Args:
        settings: those of the recipe, if there is one.
        recipe: None if the model is loaded for an unknown purpose: then its weights and 25% more must fit on the GPU.
        room, released, ranks: as in `training_fit`.
    """
    if recipe is not None:
        return training_fit(config, recipe, room, released=released, ranks=ranks).work.dense
    if room.gpu_bytes is None:
        placement = GPU if settings.dense_placement == "auto" else settings.dense_placement
        return DenseChoice(settings.dense_format or PLAIN, placement)
    shape, _ = shape_of(config)
    return loaded_choice(shape, settings, released, weight_bytes_of(config), room.gpu_bytes)


def training_reserve(need: Footprint, *, gpu: bool) -> dict[str, int]:
    """RAM that training needs in addition to what loading counts, by cause: LoRA, gradients, moments and activations,
    and beside a GPU the weights outside the experts that are in host memory.

    Args:
        need: of a `Fit` that `training_fit` returned.
    """
    counted = (PACKED,) if gpu else (PACKED, WEIGHTS)
    return {cause: size for cause, size in by_cause(need.ram).items() if cause not in counted}
