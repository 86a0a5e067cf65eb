"""Attention with sinks, fused: its scores are never in memory.

A sink is one more score of a head, learned, that takes part in the softmax and brings no value (Xiao et al. 2023, arXiv
2309.17453; gpt-oss). torch's fused attention knows no sinks, but returns the logarithm L of each row's sum of
exponentials. With a sink s the sum's logarithm is L' = log(exp(L) + exp(s)), and the output O' = exp(L - L') O. Fused
backward finds probabilities as exp(score - L) and their gradients by <dO, O>, so given O' and L' it computes the
gradients of attention with sinks.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ktft import hosts
from ktft.device import ACCELERATORS
from ktft.hosts.transformers import SINKS

logger = logging.getLogger("ktft")

PARAMETERS = ("module", "query", "key", "value", "attention_mask", "scaling", "dropout", "kwargs")
"""Parameters of the function in a model's own code. A function with others is left unchanged."""
DEVICES: Collection[str] = ACCELERATORS.keys()
"""Device types on which attention is fused; on all others its results are unchanged, bit for bit."""
_ROUNDING = 2.0**-5  # of bf16: scores, probabilities and their products are rounded in other places
_ALIGNED = 16  # values of a mask's row begin at multiples of this, as the kernels want it

Attention = Callable[..., tuple[Tensor, Tensor | None]]
_agree: dict[object, bool] = {}


def fuse_sinks(model: nn.Module) -> None:
    """Make the code of the model's attention with sinks run fused, if on first use the result agrees with its own.

    The function is replaced in the module with the model's code, so the change applies to all models in this process
    that use that code.
    """
    for code in {type(module).__module__ for module in model.modules() if _is_known(module)}:
        hosts.install([replace(SINKS, owner=code)])


def keeps_scores(model: nn.Module) -> bool:
    """Whether the scores of a model's attention are in memory on a GPU, because nothing fuses it."""
    config: Any = model.config
    eager = config.get_text_config()._attn_implementation == "eager"
    return eager and not any(_is_known(module) for module in model.modules())


def _is_known(module: nn.Module) -> bool:
    """Whether this is attention with a sink for each head, in code whose function has `PARAMETERS`."""
    if not isinstance(getattr(module, "sinks", None), Tensor):
        return False
    plain = getattr(sys.modules.get(type(module).__module__), SINKS.name, None)
    return inspect.isfunction(plain) and tuple(inspect.signature(plain).parameters) == PARAMETERS


def attend(
    plain: Attention, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What `plain` returns, without the weights of attention, if the fused result agrees with it.

    Args:
        query: `[B, heads, T, head_dim]`; key, value: the same with fewer heads, each for a group.
        attention_mask: what is added to scores, `[B, 1, T, keys]`, or None.

    Returns:
        `[B, T, heads, head_dim]`, and None.
    """
    given = module, query, key, value, attention_mask, scaling, dropout
    if dropout or kwargs.get("output_attentions") or not _is_usual(module, query, key, value):
        return plain(*given, **kwargs)
    kind = plain, query.dtype, query.device, query.shape[-1]
    if kind not in _agree:
        _agree[kind] = _agrees(plain, query)
    return (_fused(*given[:6]), None) if _agree[kind] else plain(*given, **kwargs)


def _is_usual(module: Any, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether heads have frozen sinks, and all is of one dtype and width on a GPU."""
    alike = all(each.dtype == query.dtype and each.shape[-1] == query.shape[-1] for each in (key, value))
    sinks = getattr(module, "sinks", None)
    return query.device.type in DEVICES and alike and isinstance(sinks, Tensor) and not sinks.requires_grad


def _fused(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (key, value))
    mask = None
    if attention_mask is not None:
        lowest = torch.finfo(query.dtype).min
        mask = attention_mask[..., : key.shape[2]].clamp_min(lowest).to(query.dtype)
        mask = F.pad(mask, (0, -mask.shape[-1] % _ALIGNED))[..., : key.shape[2]].expand(
            query.shape[0], query.shape[1], query.shape[2], -1
        )
    out = _Sinks.apply(query, key, value, mask, module.sinks, scaling)
    assert isinstance(out, Tensor)
    return out.transpose(1, 2).contiguous()


class _Sinks(torch.autograd.Function):
    """Attention `[B, heads, T, head_dim]` with as many heads of keys and values."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor, scaling: float
    ) -> Tensor:
        ctx.on_cpu, ctx.scaling, ops = query.device.type == "cpu", scaling, torch.ops.aten
        if ctx.on_cpu:
            flash = ops._scaled_dot_product_flash_attention_for_cpu
            out, sums, *ctx.seeds = flash(query, key, value, attn_mask=mask, scale=scaling)
        else:
            efficient = ops._scaled_dot_product_efficient_attention
            out, sums, *ctx.seeds = efficient(query, key, value, mask, True, scale=scaling)
        whole = torch.logaddexp(sums, sinks.float()[:, None].expand(sums.shape))
        share = (sums - whole)[..., : query.shape[2]].exp()  # the GPU's rows end at a multiple of 32
        out = out * share[..., None].to(out.dtype)
        ctx.save_for_backward(query, key, value, mask, out, whole)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (query, key, value, mask, out, whole) = grad_outputs, ctx.saved_tensors
        ops = torch.ops.aten
        if ctx.on_cpu:
            flash = ops._scaled_dot_product_flash_attention_for_cpu_backward
            grads = flash(grad, query, key, value, out, whole, 0.0, False, attn_mask=mask, scale=ctx.scaling)
        else:
            efficient, wanted = ops._scaled_dot_product_efficient_attention_backward, [True, True, True, False]
            grads = efficient(grad, query, key, value, mask, out, whole, *ctx.seeds, 0.0, wanted, scale=ctx.scaling)
        return *grads[:3], None, None, None


def _agrees(plain: Attention, like: Tensor) -> bool:
    """Whether both agree, forward and backward, on four heads in two groups and 40 tokens, two of them out of sight."""
    tokens, size = 40, like.shape[-1]
    waves = [torch.arange(1.0 * n * tokens * size).mul(step).sin() for n, step in ((4, 0.7), (2, 1.1), (2, 0.3))]
    given = q, k, v = [each.view(1, -1, tokens, size).to(like).requires_grad_() for each in waves]
    mask = torch.full((tokens, tokens), torch.finfo(like.dtype).min).triu(1)
    mask[:, :2] = torch.finfo(like.dtype).min
    sinks = torch.tensor([-1.0, 0.5, 2.0, 0.0]).to(like)
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=2, training=False)
    others: tuple[Tensor, float] = mask[None, None].to(like), size**-0.5
    try:
        with torch.enable_grad(), torch.autocast(like.device.type, enabled=False):
            both = [
                [out, *torch.autograd.grad(out, given, torch.ones_like(out))]
                for out in (plain(module, q, k, v, *others)[0], _fused(module, q, k, v, *others))
            ]
    except (RuntimeError, AttributeError, TypeError) as error:
        logger.info("attention with sinks runs as %s has it: %s", plain.__module__, str(error).partition("\n")[0])
        return False
    pairs = [(one.double(), other.double()) for one, other in zip(*both, strict=True)]
    agrees = all(float((one - other).norm()) <= _ROUNDING * float(one.norm()) for one, other in pairs)
    if not agrees:
        logger.info("attention with sinks of %s computes something else, so it is not fused", plain.__module__)
    return agrees
