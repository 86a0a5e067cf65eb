"""Rotary position embedding on a GPU in three launches per tensor, instead of five in forward and nine in backward.

Su et al., RoFormer (2021), with the two halves of a head rotated against each other, as in most transformers models.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ktft import hosts
from ktft.device import ACCELERATORS
from ktft.hosts.transformers import ROTARY

logger = logging.getLogger("ktft")

DEVICES: Collection[str] = ACCELERATORS.keys()
"""Device types on which rotation is fused; on all others its results are unchanged, bit for bit."""
PARAMETERS = ("q", "k", "cos", "sin", "unsqueeze_dim")
"""Parameters of the function in a model's own code. A function with others, such as positions, is left unchanged."""
_ROUNDING = 2.0**-7  # of bf16: a product and its sum are rounded once here instead of twice

Rotation = Callable[..., tuple[Tensor, Tensor]]
_agree: dict[object, bool] = {}


def fuse_rotary(model: nn.Module) -> None:
    """Make the code of the model's layers rotate queries and keys in few launches.

    It does so if on first use the result agrees with that of the code's own function. The function is replaced in the
    module with the model's code, so the change applies to all models in this process that use that code.
    """
    for code in {type(module).__module__ for module in model.modules()}:
        plain = getattr(sys.modules.get(code), ROTARY.name, None)
        if inspect.isfunction(plain) and _is_known(inspect.signature(plain)):
            hosts.install([replace(ROTARY, owner=code)])


def _is_known(signature: inspect.Signature) -> bool:
    """Whether a function has `PARAMETERS`, and only the last may be left out. Qwen4-Exp's may do without keys."""
    given = [name for name, each in signature.parameters.items() if each.default is inspect.Parameter.empty]
    return (*given, PARAMETERS[-1]) == tuple(signature.parameters) == PARAMETERS


def rotate(plain: Rotation, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """Queries and keys, rotated in few launches if the result agrees with that of `plain`."""
    given = q, k, cos, sin, unsqueeze_dim
    if q.device.type not in DEVICES or not _is_usual(q, k, cos, sin):
        return plain(*given)
    kind = plain, q.dtype, q.device, q.shape[-1], unsqueeze_dim
    if kind not in _agree:
        _agree[kind] = _agrees(plain, q, unsqueeze_dim)
    return _rotated(*given) if _agree[kind] else plain(*given)


def _is_usual(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether whole heads are rotated, in one dtype, by angles that are not trained."""
    alike = all(tensor.dtype == q.dtype and tensor.shape[-1] == q.shape[-1] for tensor in (k, cos, sin))
    return alike and not cos.requires_grad and not sin.requires_grad


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    first, second = (_Rotation.apply(each, cos, sin) for each in (q, k))
    assert isinstance(first, Tensor) and isinstance(second, Tensor)
    return first, second


@torch.no_grad()
def _agrees(plain: Rotation, like: Tensor, unsqueeze_dim: int) -> bool:
    """Whether both rotations agree on four heads at four positions, for angles of all sizes."""
    size = like.shape[-1]
    q, k = (torch.arange(16.0 * size).mul(step).sin().view(1, 4, 4, size).to(like) for step in (0.7, 1.1))
    angles = torch.arange(2.0 * size).view(1, 4, size // 2).repeat(1, 1, 2)
    given = q, k, angles.cos().to(like), angles.sin().to(like), unsqueeze_dim
    pairs = [(one.double(), other.double()) for one, other in zip(plain(*given), _rotated(*given), strict=True)]
    agrees = all(float((one - other).norm()) <= _ROUNDING * float(one.norm()) for one, other in pairs)
    if not agrees:
        logger.info("%s.%s rotates in another way, so it is not fused", plain.__module__, ROTARY.name)
    return agrees


class _Rotation(torch.autograd.Function):
    """Computes x cos + (-x₂, x₁) sin, where x₁ and x₂ are the halves of each head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        (x1, x2), (sin1, sin2) = x.chunk(2, -1), sin.chunk(2, -1)
        out = x * cos
        out1, out2 = out.chunk(2, -1)
        out1.addcmul_(x2, sin1, value=-1)
        out2.addcmul_(x1, sin2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (cos, sin) = grad_outputs, ctx.saved_tensors
        (dy1, dy2), (sin1, sin2) = dy.chunk(2, -1), sin.chunk(2, -1)
        dx = dy * cos
        dx1, dx2 = dx.chunk(2, -1)
        dx1.addcmul_(dy2, sin2)
        dx2.addcmul_(dy1, sin1, value=-1)
        return dx, None, None
