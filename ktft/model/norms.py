"""RMSNorm on a GPU by torch's fused kernel: one launch in place of eight, and as few in backward.

At few tokens a step takes as long as the host needs to launch kernels, a third of which transformers' norms are.
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
"""Types of devices where norms are fused; elsewhere they stay what they are, bit for bit."""
_ROUNDING = 2.0**-7  # of bf16: two last places, for its sums run in another order

_fused: Any = getattr(torch.ops.aten, "_fused_rms_norm", None)  # torch 2.9 has it
_agree: weakref.WeakKeyDictionary[nn.Module, dict[object, bool]] = weakref.WeakKeyDictionary()


def fuse_norms(model: nn.Module) -> None:
    """Have the model's RMSNorms use the fused kernel on a GPU, if at first use it gives what the module gives.

    What has another formula (weights around zero, a bias) stays as it is.
    """
    for module in model.modules():
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        named = type(module).__name__.endswith("RMSNorm") and list(own) == ["weight"] and own["weight"].dim() == 1
        if _fused is not None and named and isinstance(_epsilon(module), float):
            RMS_NORM.put(module, functools.partial(forward, module))


def _epsilon(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def forward(module: nn.Module, hidden_states: Tensor) -> Tensor:
    """A norm's output, by the fused kernel where that gives the same."""
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
    """Rounded once, where transformers rounds what is normalized and again what is weighted."""
    weight: Any = module.weight
    alike = weight.dtype == hidden_states.dtype
    found: Tensor = _fused(hidden_states, hidden_states.shape[-1:], weight if alike else None, _epsilon(module))[0]
    return found if alike else weight * found


@torch.no_grad()
def _agrees(module: nn.Module, like: Tensor) -> bool:
    # A generator of its own: checkpointing and resuming count on torch's generators moving alike in every pass
    sample = torch.randn(16, like.shape[-1], generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)
    theirs, ours = _plain(module, sample), _normalized(module, sample)
    agrees = theirs.dtype == ours.dtype and torch.allclose(theirs.float(), ours.float(), _ROUNDING, 1e-6)
    if not agrees:
        logger.info("%s is no plain RMSNorm, so it is not fused", type(module).__name__)
    return agrees
