"""Tiny models with ktft's experts and LoRA, and stock models that have the same LoRA in their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import ktft


def load(path: Path, **settings: Any) -> torch.nn.Module:
    """In fp32, experts in bf16 if the settings of ktft do not name another format."""
    config = ktft.KtftConfig(**{"expert_format": "bf16", "threads": 1} | settings)
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=config, dtype=torch.float32)


def load_as_stored(path: Path, **options: Any) -> torch.nn.Module:
    """In the checkpoint's data type."""
    return AutoModelForCausalLM.from_pretrained(
        path, quantization_config=ktft.KtftConfig(expert_format="bf16", threads=1), **options
    )


def lora_config(**overrides: Any) -> LoraConfig:
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | overrides)


def randomize(model: torch.nn.Module) -> torch.nn.Module:
    """B starts at zero; make every adapter matter."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter.data, std=0.1)
    return model


def adapted(path: Path, **options: Any) -> torch.nn.Module:
    return randomize(ktft.get_peft_model(load(path), lora_config(**options)))


def logits(model: torch.nn.Module) -> Tensor:
    ids = torch.arange(3, 43).reshape(2, 20)
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def merged_stock_model(checkpoint: Path, adapter: Path, scaling: Callable[[str], float]) -> torch.nn.Module:
    """transformers' own model with W + s·B·A written into its weights, from standard names alone."""
    return write_into(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), adapter, scaling)


def write_into(model: torch.nn.Module, adapter: Path, scaling: Callable[[str], float]) -> torch.nn.Module:
    weights, fused = (
        model.state_dict(),
        {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"},
    )
    tensors = load_file(adapter / "adapter_model.safetensors")
    for key in [key for key in tensors if key.endswith(".lora_A.weight")]:
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        delta = scaling(name) * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        if ".experts." not in name:
            weights[f"{name}.weight"] += delta
            continue
        layer, expert, projection = name.rsplit(".", 2)
        target = weights[f"{layer}.{fused[projection]}"][int(expert)]
        half = target.shape[0] // 2
        {"gate_proj": target[:half], "up_proj": target[half:], "down_proj": target}[projection].add_(delta)
    return model
