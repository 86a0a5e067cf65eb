"""torch's own default device and dtype, in place of those that an engine sets while it loads a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def torch_defaults() -> Iterator[None]:
    """The block makes tensors on the CPU, in fp32, unless it says otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)


def with_torch_defaults(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same weights, read with torch's own defaults; whoever takes them keeps the engine's."""
    while True:
        with torch_defaults():
            item = next(weights, None)
        if item is None:
            return
        yield item
