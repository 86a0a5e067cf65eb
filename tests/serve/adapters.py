"""Adapters with random values, written as training writes them, without a model's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoConfig

from ktft.adapters.below import Below
from ktft.adapters.files import write_adapter
from ktft.adapters.lora import KINDS
from ktft.adapters.reach import planned_reach, rank_of
from ktft.adapters.saved import PREFIX
from ktft.adapters.shared import SHARED
from ktft.config import PER_EXPERT, SHARED_OUTER
from ktft.model.experts import KtftExperts
from ktft.model.shape import shape_of


def random_adapter(
    base: Path,
    folder: Path,
    std: float = 0.2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    below: Below = (),
    form: str = PER_EXPERT,
    **options: Any,
) -> Path:
    """Save an adapter of a base model. Its B has standard deviation `std`; `options` are LoraConfig's.

    `form` is that of the LoRA on experts: what they share is drawn once.
    """
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | options)
    base_config = AutoConfig.from_pretrained(base)
    model: Any = shape_of(base_config)[1]
    reach = planned_reach(model, config)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}

    def add(name: str, fan_in: int, fan_out: int) -> None:
        r = rank_of(config, name).r
        for kind, shape, size in zip(KINDS, ((r, fan_in), (fan_out, r)), (fan_in**-0.5, std), strict=True):
            drawn = size * torch.randn(shape, generator=generator)
            tensors[f"{PREFIX}{name}.{kind}.weight"] = drawn.to(dtype)

    for name in sorted(reach.modules):
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear):
            add(name, module.in_features, module.out_features)
        elif isinstance(module, KtftExperts):
            for projection in reach.ranks[name]:
                sizes = module.hidden_size, module.intermediate_size
                fans = sizes[::-1] if projection == "down_proj" else sizes
                for expert in range(module.num_experts):
                    add(f"{name}.{expert}.{projection}", *fans)
                if form == SHARED_OUTER:
                    end = f"{projection}.{SHARED[projection]}.weight"
                    own = [tensors.pop(f"{PREFIX}{name}.{expert}.{end}") for expert in range(module.num_experts)]
                    tensors[f"{PREFIX}{name}.{end}"] = own[0][None]
    for name, module in model.named_modules():
        for suffix in config.modules_to_save or ():
            if name.endswith(suffix):
                tensors |= {
                    f"{PREFIX}{name}.{key}": torch.randn(value.shape, generator=generator)
                    for key, value in module.state_dict().items()
                }
    config.target_modules = reach.standard
    config.base_model_name_or_path = str(base)
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    write_adapter(folder, tensors, config, base_config.model_type, below)
    return folder
