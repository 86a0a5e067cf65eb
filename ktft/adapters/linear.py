"""LoRA on linear layers under autocast, without the Python and the casts around it: the same numbers, bit for bit.

PEFT casts a layer's input to the adapter's fp32, autocast casts it back: two kernels a projection that change nothing,
and two more in backward. With the modules called on the way they are a tenth of a step of few tokens.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn.functional import linear


def shorten(model: nn.Module) -> None:
    """Have the model's adapted linear layers take the short way wherever it is the same; see `restore`."""
    for module in _layers(model):
        module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]


def restore(model: nn.Module) -> None:
    """Undo `shorten`."""
    for module in _layers(model):
        if getattr(module.__dict__.get("forward"), "func", None) is _forward:
            del module.forward


def _layers(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if type(module) is Linear]


def _forward(module: Linear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    names = module.active_adapters
    if args or kwargs or len(names) != 1 or not _is_plain(module, names[0], x.device.type):
        return Linear.forward(module, x, *args, **kwargs)
    name = names[0]
    base, a, b = (cast(nn.Linear, each) for each in (module.base_layer, module.lora_A[name], module.lora_B[name]))
    result = linear(x, base.weight, base.bias)
    return result + linear(linear(x, a.weight), b.weight) * module.scaling[name]


def _is_plain(module: Linear, name: str, device: str) -> bool:
    """Whether PEFT would do no more than products, which autocast casts for, and dropout that drops nothing."""
    if module.disable_adapters or module.merged or name not in module.lora_A or name in module.lora_variant:
        return False
    dropout = module.lora_dropout[name]
    drops = not isinstance(dropout, nn.Identity) and module.training
    layers = (module.base_layer, module.lora_A[name], module.lora_B[name])
    return (
        not drops
        and torch.is_autocast_enabled(device)
        and all(map(_is_linear, layers))
        and layers[1].bias is None
        and layers[2].bias is None
    )


def _is_linear(module: nn.Module) -> bool:
    watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return type(module) is nn.Linear and not watched and "forward" not in module.__dict__
