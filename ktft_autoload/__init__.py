"""The `torch.backends` entry point: torch calls `install` in every process that imports it, torchrun's children too.

It arranges for a few modules of LLaMA-Factory to be adapted when they are imported, and does nothing else. Standard
library only, and nothing here may raise: an exception would break `import torch`. That is why this is not a module of
ktft: any file or folder named `ktft` that stands earlier on sys.path would be imported in its place. ktft itself is
imported once LLaMA-Factory is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType

MODULES = (
    "llamafactory.hparams.parser",
    "llamafactory.model.loader",
    "llamafactory.model.patcher",
    "llamafactory.model.adapter",
    "llamafactory.train.trainer_utils",
    "llamafactory.train.tuner",
)
"""What the rows of `ktft.hosts.llamafactory` change; without `use_kt: true` they behave as before."""

_warned = False


def disabled() -> bool:
    """Whether `KTFT_DISABLE` switches the hook off in this process. Read here, so that it works whatever ktft is."""
    return os.environ.get("KTFT_DISABLE", "0") not in ("", "0")


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `MODULES` as Python does, and has them adapted right after they are executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _adapt(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # this loader serves this spec only
        return spec


class _Unfinished(ModuleType):
    """A module that imports torch itself, and so is half executed at that moment. It is adapted by whoever first takes
    something from it once it is whole.
    """

    def __getattribute__(self, name: str) -> object:
        if not _is_unfinished(object.__getattribute__(self, "__spec__")):
            self.__class__ = ModuleType  # type: ignore[assignment]
            _adapt(self)
        return ModuleType.__getattribute__(self, name)


def _is_unfinished(spec: importlib.machinery.ModuleSpec | None) -> bool:
    return bool(getattr(spec, "_initializing", False))  # as the import system itself asks


def install() -> None:
    """Start adapting LLaMA-Factory, including modules imported before. Further calls change nothing."""
    try:
        if disabled() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
            return
        sys.meta_path.insert(0, _Finder())
        for name in MODULES:
            module = sys.modules.get(name)
            if module is not None and _is_unfinished(module.__spec__):
                module.__class__ = _Unfinished
            elif module is not None:
                _adapt(module)
    except Exception as error:
        _warn(f"{type(error).__name__}: {error}")


def _adapt(module: ModuleType) -> None:
    try:
        if other := _in_place_of_ktft():
            return _warn(f"{other} is imported in place of ktft, since its folder comes first on sys.path: rename it")
        importlib.import_module("ktft.hosts.llamafactory").adapt(module)
    except Exception as error:
        _warn(f"{type(error).__name__}: {error}")


def _in_place_of_ktft() -> str:
    """What `import ktft` would import instead; empty where it is ktft. Looks without importing it."""
    loaded = sys.modules.get("ktft")
    spec = importlib.util.find_spec("ktft") if loaded is None else loaded.__spec__
    if spec is None or spec.submodule_search_locations is None:
        return "" if spec is None else str(spec.origin)
    places = list(spec.submodule_search_locations)
    known = any(os.path.exists(os.path.join(place, "hosts", "llamafactory.py")) for place in places)
    return "" if known else ", ".join(places)


def _warn(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        print(
            f"ktft: its LLaMA-Factory integration is off, so use_kt: true will not work: {reason} "
            "(run `ktft doctor`; KTFT_DISABLE=1 silences this)",
            file=sys.stderr,
        )
