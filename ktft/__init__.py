"""Fine-tune Mixture-of-Experts models whose routed experts live, quantized, in CPU memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktft.adapters.peft import get_peft_model, load_adapter
    from ktft.model.quantizer import KtftConfig
    from ktft.train.trainer import Trainer

# Imported on first use, so that `import ktft` needs no torch.
_EXPORTS = {
    "KtftConfig": "ktft.model.quantizer",
    "Trainer": "ktft.train.trainer",
    "get_peft_model": "ktft.adapters.peft",
    "load_adapter": "ktft.adapters.peft",
}

__all__ = ["KtftConfig", "Trainer", "__version__", "get_peft_model", "load_adapter"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("ktft")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'ktft' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
