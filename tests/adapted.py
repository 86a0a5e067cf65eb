"""Tiny models with ktft's experts and LoRA, and stock models that have the same LoRA in their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from merging import write_into
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import ktft


def load(
    path: Path, dtype: torch.dtype = torch.float32, distributed: dict[str, Any] | None = None, **settings: Any
) -> torch.nn.Module:
    """Load a model with ktft's experts, in bf16 unless the settings name another format.

    `distributed` are the arguments of transformers' DistributedConfig.
    """
    config = ktft.KtftConfig(**{"expert_format": "bf16", "threads": 1} | settings)
    options: dict[str, Any] = {}
    if distributed:
        from transformers.distributed import DistributedConfig  # not in the older stack

        options["distributed_config"] = DistributedConfig(**distributed)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=dtype, **options)


def load_as_stored(path: Path, **options: Any) -> torch.nn.Module:
    """Load a model in the checkpoint's data type."""
    config = ktft.KtftConfig(expert_format="bf16", threads=1)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, **options)


def lora_config(**overrides: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | overrides)


def randomize(model: torch.nn.Module, std: float = 0.1) -> torch.nn.Module:
    """Give B, which starts at zero, random values, so that every adapter matters."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=std)
    return model


def adapted(path: Path, **options: Any) -> torch.nn.Module:
    return randomize(ktft.get_peft_model(load(path), lora_config(**options)))


def logits(model: torch.nn.Module) -> Tensor:
    ids = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def tensors_of(adapter: Path) -> dict[str, Tensor]:
    """All tensors of a saved adapter."""
    return load_file(adapter / "adapter_model.safetensors")


def merged_stock_model(checkpoint: Path, adapter: Path, scaling: Callable[[str], float]) -> torch.nn.Module:
    """transformers' own model with W + s·B·A in its weights, found by standard names alone."""
    return write_into(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), adapter, scaling)
