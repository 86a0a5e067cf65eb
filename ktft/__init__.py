"""Fine-tune Mixture-of-Experts models whose routed experts live, quantized, in CPU memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktft.model.quantizer import KtftConfig
    from ktft.train.trainer import Trainer, get_peft_model, load_adapter

# Imported on first use, so that `import ktft` needs no torch. Whatever is used first, the trainer's module is imported
# before it: a model that is made afterwards is adapted by any PEFT call, and checked and reported by any Trainer.
_HOSTS = "ktft.train.trainer"
_EXPORTS = {
    "KtftConfig": "ktft.model.quantizer",
    "Trainer": _HOSTS,
    "get_peft_model": _HOSTS,
    "load_adapter": _HOSTS,
}

__all__ = ["KtftConfig", "Trainer", "__version__", "get_peft_model", "load_adapter"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("ktft")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ktft' has no attribute {name!r}")
    importlib.import_module(_HOSTS)
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
