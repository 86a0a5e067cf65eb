"""Models of every family, stock and with ktft's experts, made so that the two can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import ktft
from ktft.config import PROJECTIONS

VISION = r".*\.(visual|vision_tower|multi_modal_projector|mm_projector)\..*"
IDS = torch.arange(3, 67).reshape(4, 16)


def load(path: Path, expert_format: str | None = "bf16") -> Any:
    """Load the stock model, or one with ktft's experts, in fp32."""
    has_images = "text_config" in type(AutoConfig.from_pretrained(path)).sub_configs
    auto = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    options = {"quantization_config": ktft.KtftConfig(expert_format=expert_format, threads=1)} if expert_format else {}
    return auto.from_pretrained(path, dtype=torch.float32, **options)


def adapt(model: Any, targets: Any = "all-linear", b_std: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, exclude_modules=VISION)
    model = ktft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and b_std:
            nn.init.normal_(parameter, std=b_std)
    return model


def same_choices(stock: nn.Module, mine: nn.Module, experts: list[str]) -> None:
    """Make `mine` choose the experts of `stock`, which runs first: rounding may tip a near tie. No router learns."""
    chosen: dict[str, Any] = {}

    def choose(name: str, args: Any) -> Any:
        chosen[name] = (args[1], args[2].detach())
        return args[0], *chosen[name]

    for name in experts:
        stock.get_submodule(name).register_forward_pre_hook(lambda _, args, n=name: choose(n, args))
        mine.get_submodule(name).register_forward_pre_hook(lambda _, args, n=name: (args[0], *chosen[n]))
    for name, module in stock.named_modules():
        if name.endswith(".indexer"):
            module.register_forward_hook(lambda _, __, out, n=name: chosen.update({n: out}))
            mine.get_submodule(name).register_forward_hook(lambda _, __, out, n=name: chosen[n])


def matrices(module: nn.Module, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """Projection -> `[E, out, in]`, views into a stock module's stacked tensors."""
    if module.is_transposed:  # gpt-oss, whose gates and ups alternate
        return {"gate_proj": gate_up.mT[:, ::2], "up_proj": gate_up.mT[:, 1::2], "down_proj": down.mT}
    return dict(zip(PROJECTIONS, (*gate_up.chunk(2, dim=1), down), strict=True))


def text_loss(model: nn.Module) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=IDS, use_cache=False).logits
    return logits, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
