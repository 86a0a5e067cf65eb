"""Random adapters merged by hand, to compare `ktft merge` with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from stock import matrices, stacked
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import ktft

IDS = torch.arange(3, 67).reshape(4, 16)


def run(*arguments: str | Path) -> tuple[int, str]:
    """`ktft merge` with one thread: exit status and output."""
    return commands.run("merge", *arguments, "--threads", "1")


def merge(*arguments: str | Path) -> Path:
    """Merge, and return OUT."""
    status, output = run(*arguments)
    assert status == 0, output
    return Path(arguments[2])


def write_adapter(base: Path, folder: Path, size: float = 0.05, **options: Any) -> Path:
    """Save an adapter whose B is random with standard deviation `size`; modules of `modules_to_save` change too."""
    config = ktft.KtftConfig(expert_format="bf16", threads=1)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, quantization_config=config)
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | options
    model = ktft.get_peft_model(model, LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=size)
        elif "modules_to_save" in name:
            parameter.data += size * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def stock(path: Path) -> Any:
    """transformers' own model in fp32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=IDS, use_cache=False).logits
    return found


def scaling(adapter: Path, name: str) -> float:
    """The scaling of a module, from the adapter's config alone."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    leaf = name.rpartition(".")[2]
    r = config["rank_pattern"].get(leaf, config["r"])
    return config["alpha_pattern"].get(leaf, config["lora_alpha"]) / (r**0.5 if config["use_rslora"] else r)


def merged_by_hand(plain: Path, adapter: Path) -> Any:
    """transformers' model of a dequantized checkpoint, with the adapter merged into its weights."""
    return write_into(stock(plain), adapter, lambda name: scaling(adapter, name))


def write_into(model: Any, adapter: Path, scaling: Callable[[str], float]) -> Any:
    """Write W + s B A and modules that were trained whole into a stock model, by their names alone."""
    tensors = standard(load_file(adapter / "adapter_model.safetensors"))
    for key, tensor in tensors.items():
        name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if key.endswith(".lora_A.weight"):
            weight_of(model, name).add_(scaling(name) * tensors[key.replace("lora_A", "lora_B")] @ tensor)
        elif not key.endswith(".lora_B.weight"):
            model.get_parameter(name).data.copy_(tensor)
    return model


def standard(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """An adapter's tensors with what experts share under the standard name of each."""
    found = {}
    for name, tensor in tensors.items():
        if shared := re.fullmatch(r"(.+\.experts)\.([a-z]+_proj\.lora_[AB]\.weight)", name):
            numbers = {each.removeprefix(f"{shared[1]}.").split(".")[0] for each in tensors if shared[1] in each}
            found |= {f"{shared[1]}.{e}.{shared[2]}": tensor[0] for e in numbers if e.isdecimal()}
        else:
            found[name] = tensor
    return found


def weight_of(model: nn.Module, name: str) -> Tensor:
    """A view of a weight of stock transformers, `[out, in]`, by the name that PEFT has for it."""
    if ".experts." not in name:
        return model.get_parameter(f"{name}.weight").data
    experts, expert, projection = name.rsplit(".", 2)
    module = model.get_submodule(experts)
    return matrices(module, *(parameter.data for parameter in stacked(module)))[projection][int(expert)]


def names_of(adapter: Path) -> list[str]:
    """Names of the modules with LoRA."""
    keys = load_file(adapter / "adapter_model.safetensors")
    return [k.removeprefix("base_model.model.").removesuffix(".lora_A.weight") for k in keys if "lora_A" in k]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
