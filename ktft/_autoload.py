"""The `torch.backends` entry point: torch calls `install` in every process that imports it, torchrun's children too.

It arranges for a few modules of LLaMA-Factory to be adapted when they are imported, and does nothing else. Standard
library only, and nothing here may raise: an exception would break `import torch`.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

MODULES = ("llamafactory.hparams.parser", "llamafactory.model.loader", "llamafactory.model.adapter")
"""What `ktft.train.llamafactory.adapt` changes; without `use_kt: true` they behave as before."""

_warned = False


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


def install() -> None:
    """Start adapting LLaMA-Factory, including modules imported before. Further calls change nothing."""
    try:
        config = importlib.import_module("ktft.config")
        if config.disabled() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
            return
        sys.meta_path.insert(0, _Finder())
        for name in MODULES:
            if name in sys.modules:
                _adapt(sys.modules[name])
    except Exception as error:
        _warn(error)


def _adapt(module: ModuleType) -> None:
    try:
        importlib.import_module("ktft.train.llamafactory").adapt(module)
    except Exception as error:
        _warn(error)


def _warn(error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        print(
            f"ktft: its LLaMA-Factory integration is off, so use_kt: true will not work: {type(error).__name__}: "
            f"{error} (run `ktft doctor`; KTFT_DISABLE=1 silences this)",
            file=sys.stderr,
        )
