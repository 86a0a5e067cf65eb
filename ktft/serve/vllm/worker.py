"""What vLLM's worker can be asked to do with ktft's part of the model: `--worker-extension-cls`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import nn

from ktft.serve.runtime.served_adapter import ServedAdapter
from ktft.serve.runtime.served_model import current
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.runtime.swap import swap_adapter
from ktft.serve.vllm.lora_linear import slots_of, target_of


class KtftWorker:
    """Methods that vLLM adds to its worker. `collective_rpc` calls them by name, between two steps of the model.

    What they raise reaches the caller as one text, and the engine goes on; `ktft.serve.vllm.middleware.reason_of`
    gives the message in it.
    """

    def ktft_set_adapter(self, path: str | None) -> dict[str, Any]:
        """`set_adapter`, and the seconds that it took, as values of JSON.

        No request may be in flight. The caller drops the KV cache, whose keys were computed with another adapter.
        """
        begin = time.perf_counter()
        adapter = set_adapter(self.get_model(), path)  # type: ignore[attr-defined]
        return {"adapter": adapter, "seconds": time.perf_counter() - begin}

    def ktft_status(self) -> dict[str, Any]:
        """`ktft.serve.runtime.served_model.ServedModel.status`."""
        return current().status()


def set_adapter(model: nn.Module, path: str | None) -> dict[str, Any] | None:
    """Put an adapter into the model that this process computes, in place of the one before; None takes that out.

    Returns what `swap_adapter` does, and raises what it and `ServedAdapter` do.
    """
    experts, adapter = current(), None
    if path is not None:
        settings = ServeSettings.from_env()
        target = target_of(model, settings.max_lora_rank, experts.sizes())
        adapter = ServedAdapter(Path(path), Path(settings.checkpoint), target)
    return swap_adapter(adapter, experts, {name: layer.quant_method for name, layer in slots_of(model).items()})
