"""Models of every family, stock and with ktft's experts, made so that the two can be compared."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

import ktft
from ktft.config import PROJECTIONS
from ktft.model.experts import is_transposed

VISION = r"(.*\.)?(visual|vision_tower|vision_model|multi_modal_projector|mm_projector)(\..*)?"
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

    routers = {name.replace(".experts", ".router") for name in experts if not takes_choices(stock.get_submodule(name))}
    for name in (name for name in experts if takes_choices(stock.get_submodule(name))):
        stock.get_submodule(name).register_forward_pre_hook(lambda _, args, n=name: choose(n, args))
        mine.get_submodule(name).register_forward_pre_hook(lambda _, args, n=name: (args[0], *chosen[n]))
    for name, module in stock.named_modules():
        if name.endswith(".indexer") or name in routers:
            module.register_forward_hook(lambda _, __, out, n=name: chosen.update({n: _detached(out)}) or chosen[n])
            mine.get_submodule(name).register_forward_hook(lambda _, __, out, n=name: chosen[n])


def stacked(module: nn.Module) -> tuple[Any, Any]:
    """A stock module's stacked gate and up, or up alone; and down."""
    return getattr(module, "gate_up_proj" if hasattr(module, "gate_up_proj") else "up_proj"), module.down_proj


def _detached(out: Any) -> Any:
    return tuple(map(_detached, out)) if isinstance(out, tuple) else out.detach()


def takes_choices(experts: nn.Module) -> bool:
    """Whether stock experts are called with the router's choices; Llama-4's are not."""
    return len(inspect.signature(experts.forward).parameters) > 1


def matrices(module: nn.Module, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """Projection -> `[E, out, in]`, views into a stock module's stacked tensors."""
    if not hasattr(module, "gate_up_proj"):
        return {"up_proj": gate_up, "down_proj": down}
    if is_transposed(module):
        gate_up, down = gate_up.mT, down.mT
    if hasattr(module, "gate_up_proj_bias"):  # gpt-oss, whose gates and ups alternate
        return {"gate_proj": gate_up[:, ::2], "up_proj": gate_up[:, 1::2], "down_proj": down}
    gate_up = gate_up[: len(down)]  # LongCat's has rows for experts that compute nothing
    return dict(zip(PROJECTIONS, (*gate_up.chunk(2, dim=1), down), strict=True))


def text_loss(model: nn.Module) -> tuple[Tensor, Tensor]:
    logits = model(input_ids=IDS, use_cache=False).logits
    return logits, nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
