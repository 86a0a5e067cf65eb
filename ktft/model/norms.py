"""RMSNorm in one pass over its input, and one in backward: by torch's fused kernel on a GPU, by ktft's own on a CPU.

On a GPU with few tokens, the duration of a step is the host's time to launch kernels, and a third of the launches would
be for norms. On a CPU they would be a fifth of what a layer does around its experts, most of it in fp32 copies.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ktft.device import ACCELERATORS
from ktft.hosts.transformers import RMS_NORM
from ktft.native import Runtime
from ktft.native.norm import MULTIPLE, HostNorm

logger = logging.getLogger("ktft")

DEVICES: Collection[str] = ACCELERATORS.keys()
"""Device types on which torch has the fused kernel."""
_ROUNDING = 2.0**-7  # two last places of bf16, because the fused kernels sum in another order

_fused: Any = getattr(torch.ops.aten, "_fused_rms_norm", None)  # torch 2.9 has it
_agree: weakref.WeakKeyDictionary[nn.Module, dict[object, bool]] = weakref.WeakKeyDictionary()
_Way = Callable[[Any, Tensor], Tensor]
"""Computes a module's norm of its input."""


def fuse_norms(model: nn.Module, runtime: Callable[[], Runtime] | None = None) -> None:
    """Make the model's RMSNorms use a fused kernel, if on first use its output agrees with the module's.

    Modules with another formula (weights around zero, a bias) are left unchanged. `runtime` gives the threads of norms
    on a CPU, which are left unchanged without it, and where their weight is trained or no bf16.
    """
    for module in model.modules():
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        named = type(module).__name__.endswith("RMSNorm") and list(own) == ["weight"] and own["weight"].dim() == 1
        if named and isinstance(_epsilon(module), float):
            RMS_NORM.put(module, functools.partial(forward, module, runtime=runtime))


def _epsilon(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def forward(module: nn.Module, hidden_states: Tensor, runtime: Callable[[], Runtime] | None = None) -> Tensor:
    """A norm's output, by a fused kernel if its output agrees with the module's."""
    way = _way(module, hidden_states, runtime)
    if way is None:
        return _plain(module, hidden_states)
    known, weight = _agree.setdefault(module, {}), cast(Tensor, module.weight)
    kind = hidden_states.dtype, weight.dtype, hidden_states.device, _epsilon(module)
    if kind not in known:
        known[kind] = _agrees(module, hidden_states, way)
    return way(module, hidden_states) if known[kind] else _plain(module, hidden_states)


def _way(module: nn.Module, hidden: Tensor, runtime: Callable[[], Runtime] | None) -> _Way | None:
    """How to compute a norm; None for the module's own way."""
    if hidden.device.type in DEVICES:
        return _by_torch if _fused is not None else None
    weight = cast(Tensor, module.weight)
    fits = not weight.requires_grad and len(weight) % MULTIPLE == 0 and hidden.shape[-1:] == weight.shape
    kinds = {(each.dtype, each.device.type) for each in (hidden, weight)}
    plain = type(hidden) is Tensor and type(weight) in (Tensor, nn.Parameter) and not torch.compiler.is_compiling()
    if runtime is None or not fits or not plain or kinds != {(torch.bfloat16, "cpu")}:
        return None
    return functools.partial(_on_cpu, runtime)


def _plain(module: nn.Module, hidden_states: Tensor) -> Tensor:
    found: Tensor = type(module).forward(module, hidden_states)
    return found


def _by_torch(module: Any, hidden_states: Tensor) -> Tensor:
    """The fused norm. It rounds once, whereas transformers rounds after normalizing and again after weighting."""
    weight: Any = module.weight
    alike = weight.dtype == hidden_states.dtype
    found: Tensor = _fused(hidden_states, hidden_states.shape[-1:], weight if alike else None, _epsilon(module))[0]
    return found if alike else weight * found


def _on_cpu(runtime: Callable[[], Runtime], module: Any, hidden_states: Tensor) -> Tensor:
    found: Tensor = _HostNorm.apply(runtime(), _epsilon(module), hidden_states, module.weight)
    return found


class _HostNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, runtime: Runtime, epsilon: float, x: Tensor, weight: Tensor) -> Tensor:
        ctx.runtime, ctx.epsilon = runtime, epsilon
        ctx.save_for_backward(x, weight)
        return HostNorm(runtime, weight, epsilon)(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None]:
        x, weight = ctx.saved_tensors  # FSDP2 gives the weight other memory than in forward
        return None, None, HostNorm(ctx.runtime, weight, ctx.epsilon).backward(x, grad), None


@torch.no_grad()
def _agrees(module: nn.Module, like: Tensor, way: _Way) -> bool:
    # Use a separate generator: checkpointing and resuming need torch's generators to advance equally in every pass.
    sample = torch.randn(16, like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    theirs, ours = _plain(module, sample), way(module, sample)
    agrees = theirs.dtype == ours.dtype and torch.allclose(theirs.float(), ours.float(), _ROUNDING, 1e-6)
    if not agrees:
        logger.info("%s is no plain RMSNorm, so it is not fused", type(module).__name__)
    return agrees
