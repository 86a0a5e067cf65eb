"""RMSNorm on a GPU by torch's fused kernel: one kernel launch instead of eight, and as few in backward.

With few tokens, the duration of a step is the host's time to launch kernels; a third of the launches are for norms.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from ktft.device import ACCELERATORS
from ktft.hosts.transformers import RMS_NORM

logger = logging.getLogger("ktft")

DEVICES: Collection[str] = ACCELERATORS.keys()
"""Device types on which norms are fused; on all others their results are unchanged, bit for bit."""
_ROUNDING = 2.0**-7  # two last places of bf16, because the fused kernel sums in another order

_fused: Any = getattr(torch.ops.aten, "_fused_rms_norm", None)  # torch 2.9 has it
_agree: weakref.WeakKeyDictionary[nn.Module, dict[object, bool]] = weakref.WeakKeyDictionary()


def fuse_norms(model: nn.Module) -> None:
    """Make the model's RMSNorms use the fused kernel on a GPU, if on first use its output agrees with the module's.

    Modules with another formula (weights around zero, a bias) are left unchanged.
    """
    for module in model.modules():
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        named = type(module).__name__.endswith("RMSNorm") and list(own) == ["weight"] and own["weight"].dim() == 1
        if _fused is not None and named and isinstance(_epsilon(module), float):
            RMS_NORM.put(module, functools.partial(forward, module))


def _epsilon(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def forward(module: nn.Module, hidden_states: Tensor) -> Tensor:
    """A norm's output, by the fused kernel if its output agrees with the module's."""
    if hidden_states.device.type not in DEVICES:
        return _plain(module, hidden_states)
    known, weight = _agree.setdefault(module, {}), cast(Tensor, module.weight)
    kind = hidden_states.dtype, weight.dtype, hidden_states.device, _epsilon(module)
    if kind not in known:
        known[kind] = _agrees(module, hidden_states)
    return _normalized(module, hidden_states) if known[kind] else _plain(module, hidden_states)


def _plain(module: nn.Module, hidden_states: Tensor) -> Tensor:
    found: Tensor = type(module).forward(module, hidden_states)
    return found


def _normalized(module: nn.Module, hidden_states: Tensor) -> Tensor:
    """The fused norm. It rounds once, whereas transformers rounds after normalizing and again after weighting."""
    weight: Any = module.weight
    alike = weight.dtype == hidden_states.dtype
    found: Tensor = _fused(hidden_states, hidden_states.shape[-1:], weight if alike else None, _epsilon(module))[0]
    return found if alike else weight * found


@torch.no_grad()
def _agrees(module: nn.Module, like: Tensor) -> bool:
    # Use a separate generator: checkpointing and resuming need torch's generators to advance equally in every pass.
    sample = torch.randn(16, like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    theirs, ours = _plain(module, sample), _normalized(module, sample)
    agrees = theirs.dtype == ours.dtype and torch.allclose(theirs.float(), ours.float(), _ROUNDING, 1e-6)
    if not agrees:
        logger.info("%s is no plain RMSNorm, so it is not fused", type(module).__name__)
    return agrees
