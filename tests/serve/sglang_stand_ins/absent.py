"""What a module that stands in for an absent one has: any name, as a class that cannot be made.

These folders are for tests on machines without a GPU. SGLang imports torchvision and its own kernels, sgl_kernel, when
it starts, and neither has a build for CPUs in the package index. Serving text on a CPU with `--attention-backend
torch_native` calls nothing of either: SGLang then computes with torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def absent(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that stands in for `module`."""

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{module}.{name} is a stand-in of ktft's tests and computes nothing")

        return type(name, (), {"__new__": refuse, "__module__": module})

    return __getattr__
