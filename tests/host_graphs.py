"""Graphs on the CPU, in place of a GPU's: operations of torch that are recorded, and run again on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ktft.device import Device


class HostGraph(TorchDispatchMode):
    """Has the methods of `ktft.device.CudaGraph`. What it records also runs, which a GPU's graph does not."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def begin(self) -> None:
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)
        # A graph does not run what it records: whoever reads its results before a replay must see that
        for _, args, kwargs, out in self._operations:
            given = {_memory(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            for each in tree_leaves(out):
                if isinstance(each, Tensor) and _memory(each) not in given and each.is_floating_point():
                    each.data.fill_(torch.nan)  # without a sign to autograd

    def replay(self) -> None:
        self.replays += 1
        # What was recorded has been cast already
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for function, args, kwargs, before in self._operations:
                now = function(*args, **kwargs)
                for old, new in zip(tree_leaves(before), tree_leaves(now), strict=True):
                    if isinstance(old, Tensor) and _memory(old) != _memory(new):
                        old.copy_(new)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        out = function(*args, **(kwargs or {}))
        self._operations.append((function, args, kwargs or {}, out))
        return out


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def record_on_host(put: Callable[[Any, str, Any], None]) -> list[HostGraph]:
    """From now on, the CPU records graphs: `put` sets attributes. Returns a list of those that were made."""
    made: list[HostGraph] = []

    def new_graph(self: Device, pool: Any = None) -> HostGraph:
        made.append(HostGraph())
        return made[-1]

    put(Device, "records_graphs", True)
    put(Device, "new_graph", new_graph)
    return made
