"""What vLLM's worker can be asked to do with ktft's part of the model: `--worker-extension-cls`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import nn

from ktft.serve.runtime.served_adapter import ServedAdapter
from ktft.serve.runtime.served_model import current
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.runtime.slots import add_adapter, remove_adapter
from ktft.serve.vllm.lora_linear import slots_of, target_of


class KtftWorker:
    """Methods that vLLM adds to its worker. `collective_rpc` calls them by name, between two steps of the model.

    What they raise reaches the caller as one text, and the engine goes on; `ktft.serve.vllm.middleware.reason_of`
    gives the message in it.
    """

    def ktft_add_adapter(self, number: int, path: str) -> dict[str, Any]:
        """Load an adapter beside others, see `add`. Requests of others may be in flight."""
        begin = time.perf_counter()
        adapter = add(self.get_model(), number, path)  # type: ignore[attr-defined]
        return {"adapter": adapter, "seconds": time.perf_counter() - begin}

    def ktft_remove_adapter(self, number: int) -> None:
        """Take an adapter out, of which no request is in flight."""
        remove_adapter(number, current(), slots_of(self.get_model()))  # type: ignore[attr-defined]

    def ktft_status(self) -> dict[str, Any]:
        """`ktft.serve.runtime.served_model.ServedModel.status`."""
        return current().status()


def add(model: nn.Module, number: int, path: str) -> dict[str, Any]:
    """Put an adapter into the model that this process computes, for tokens that have its number.

    Returns what `ktft.serve.runtime.slots.add_adapter` does, and raises what it and `ServedAdapter` do.
    """
    settings = ServeSettings.from_env()
    target = target_of(model, settings.max_lora_rank, current().sizes())
    adapter = ServedAdapter(Path(path), Path(settings.checkpoint), target)
    return add_adapter(number, adapter, current(), slots_of(model))
