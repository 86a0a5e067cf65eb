from __future__ import annotations

from typing import Any


def absent(module: str) -> Any:
    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{module}.{name} is a stand-in without a body")

        return type(name, (), {"__new__": refuse, "__module__": module, "__getattr__": refuse})

    return __getattr__
