"""Chunks of a few tokens, and a measure of how many have logits at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ktft.model.lazy_logits import LazyLogits

CHUNK = 5
"""Tokens of a chunk."""
WORDS = 320
IGNORED = -100


class Largest(TorchDispatchMode):
    """The most rows of logits, of their copies or gradients, that an operation has made."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for each in out if isinstance(out, tuple | list) else (out,):
            of_words = isinstance(each, Tensor) and each.shape[-1:] == (WORDS,) and func is not torch.ops.aten.t.default
            if of_words and not each.is_meta and not isinstance(each, LazyLogits):
                self.rows = max(self.rows, each.shape[:-1].numel())
        return out
