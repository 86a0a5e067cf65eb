"""LoRA on linear layers under autocast, without PEFT's casts around it and with few nodes in autograd's graph.

PEFT casts a layer's input to the adapter's fp32, autocast casts it back, and each of the three products, the scaling
and the sum is an autograd node: 16 kernels per projection, forward and backward, not counting the casts. With few
tokens, the duration of a step is the host's time to launch them. Here there are 12 kernels in a single node, and the
contributions of a layer's two paths, base weight and LoRA, are summed in fp32.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ktft.dense.linear import DenseWeight, PackedLinear
from ktft.hosts.peft import LINEAR


def check_packed(model: nn.Module, config: Any) -> None:
    """Refuse a LoRA that reads the weights of linear layers, if these are packed.

    Raises:
        ValueError: it does; the message says what to set.
    """
    packed = next((module for module in model.modules() if isinstance(module, PackedLinear)), None)
    init = getattr(config, "init_lora_weights", True)
    reads = "use_dora" if getattr(config, "use_dora", False) else f"init_lora_weights={init!r}"
    if packed is not None and (reads == "use_dora" or init not in (True, False, "gaussian")):
        raise ValueError(
            f"{reads} reads the whole weights of linear layers, which dense_format {packed.format!r} and "
            "dense_placement keep in another form; leave it out, or set dense_format: bf16 and dense_placement: gpu"
        )


def shorten(model: nn.Module) -> None:
    """Make the model's adapted linear layers use the single node of this module wherever it applies; see `restore`."""
    for module in _layers(model):
        LINEAR.put(module, functools.partial(forward, module))


def restore(model: nn.Module) -> None:
    """Undo `shorten`."""
    for module in _layers(model):
        if getattr(module.__dict__.get("forward"), "func", None) is forward:
            LINEAR.take_off(module)


def _layers(model: nn.Module) -> list[Linear]:
    return [module for module in model.modules() if type(module) is Linear]


def forward(module: Linear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A layer's output: by `_Lora` if PEFT would compute nothing but products, otherwise by PEFT's own forward."""
    names = module.active_adapters
    if args or kwargs or len(names) != 1 or not _is_plain(module, names[0], x.device.type):
        return Linear.forward(module, x, *args, **kwargs)
    name = names[0]
    base, a, b = _parts(module, name)
    weight, dtype = (base.packed, base.dtype) if isinstance(base, PackedLinear) else (base.weight, base.weight.dtype)
    out = _Lora.apply(x.to(dtype), weight, base.bias, a.weight, b.weight, module.scaling[name])
    assert isinstance(out, Tensor)
    return out


def _parts(module: Linear, name: str) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
    return cast("tuple[nn.Linear, nn.Linear, nn.Linear]", (module.base_layer, module.lora_A[name], module.lora_B[name]))


def _is_plain(module: Linear, name: str, device: str) -> bool:
    """Whether PEFT would compute nothing but products in autocast's dtype, with a dropout that drops nothing."""
    if module.disable_adapters or module.merged or name not in module.lora_A or name in module.lora_variant:
        return False
    drops = module.training and not isinstance(module.lora_dropout[name], nn.Identity)
    if drops or not torch.is_autocast_enabled(device):
        return False
    dtype, (base, a, b) = torch.get_autocast_dtype(device), _parts(module, name)
    return (
        all(map(_is_linear, (base, a, b)))
        and a.bias is None
        and b.bias is None
        and (base.dtype if isinstance(base, PackedLinear) else base.weight.dtype) == dtype
        and not base.weight.requires_grad
        and (base.bias is None or (base.bias.dtype == dtype and not base.bias.requires_grad))
    )


def _is_linear(module: nn.Module) -> bool:
    watched = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    return type(module) in (nn.Linear, PackedLinear) and not watched and "forward" not in module.__dict__


class _Lora(torch.autograd.Function):
    """Computes W x + bias + scaling · B A x for rows x `[..., in]`; x and W are bf16 or fp16, A and B of any dtype.

    A packed W is decoded for each product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | DenseWeight,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        scaling: float,
    ) -> Tensor:
        rows, a, b = x.reshape(-1, x.shape[-1]), lora_a.to(x.dtype), lora_b.to(x.dtype)
        ctx.packed = weight if isinstance(weight, DenseWeight) else None
        base = weight.decode(x.dtype) if isinstance(weight, DenseWeight) else weight
        out = rows @ base.T if bias is None else torch.addmm(bias, rows, base.T)
        low = _product(rows, a.T, scaling)
        out.addmm_(low, b.T)
        ctx.save_for_backward(rows, low, None if ctx.packed else base, a, b)
        ctx.scaling, ctx.dtypes = scaling, (lora_a.dtype, lora_b.dtype)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, low, weight, a, b = ctx.saved_tensors
        of_x, _, _, of_a, of_b, _ = ctx.needs_input_grad
        dy = grad_output.reshape(-1, grad_output.shape[-1])
        grad_x = grad_a = grad_b = None
        d_low = _product(dy, b, ctx.scaling) if of_x or of_a else low
        if of_x:
            weight = ctx.packed.decode(dy.dtype) if ctx.packed else weight
            grad_x = (dy @ weight).addmm_(d_low, a).view(*grad_output.shape[:-1], rows.shape[1])
        if of_a:
            grad_a = (d_low.T @ rows).to(ctx.dtypes[0])
        if of_b:
            grad_b = (dy.T @ low).to(ctx.dtypes[1])
        return grad_x, None, None, grad_a, grad_b, None


def _product(rows: Tensor, matrix: Tensor, scaling: float) -> Tensor:
    """The product scaling · rows · matrix, rounded once."""
    return torch.addmm(rows.new_empty(1), rows, matrix, beta=0, alpha=scaling)
