"""Launches of Triton kernels past its compiler's front, which looks at every argument anew: half of a launch's time."""

from __future__ import annotations

import functools
import importlib.metadata
import re
from typing import Any

from torch import Tensor

KNOWN = (3, 3), (3, 7)
"""First and last version of Triton whose compiled kernels take all arguments, constants too, in their order."""
ALIGNED = 16
"""Bytes: what Triton compiles another kernel for, where an address is no multiple of them."""


def short(function: Any) -> Any:
    """A jitted kernel that is launched the short way once it is compiled for arguments of the same kind.

    It is called as before, `kernel[grid](*args, **constants)`: constants by name, all else by place.
    """
    if type(function).__name__ != "JITFunction" or not KNOWN[0] <= _version() <= KNOWN[1]:
        return function
    return _Kernel(function)


@functools.cache
def _version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("triton"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


class _Kernel:
    def __init__(self, function: Any) -> None:
        self._function = function
        self._constants = [param.name for param in function.params if param.is_constexpr]
        self._exact = [not param.do_not_specialize for param in function.params if not param.is_constexpr]
        self._compiled: dict[tuple[object, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        values = [constants[name] for name in self._constants]
        key = args[0].device, *values, *map(_kind, args, self._exact)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._function[grid](*args, **constants)
        else:
            compiled[(*grid, 1, 1)[:3]](*args, *values)


def _kind(arg: Any, exact: bool) -> object:
    """What Triton compiles for, or more: numbers themselves unless they are not `exact`."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % ALIGNED == 0
    if isinstance(arg, float):
        return float
    return arg if exact or not isinstance(arg, int) else arg.bit_length() < 32


# Triton has these two for its kernels; called from Python, its versions take ten times as long
def cdiv(value: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-value // by)


def power_of_2(value: int) -> int:
    """The smallest power of two that is not smaller than `value`."""
    return 1 << (value - 1).bit_length()
