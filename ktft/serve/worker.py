"""What vLLM's worker can be asked to do with ktft's part of the model: `--worker-extension-cls`."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import torch

from ktft.lora import ExpertLora
from ktft.serve.adapter import LoadedAdapter, ServedAdapter
from ktft.serve.experts import current
from ktft.serve.linear import B, slots_of, target_of
from ktft.serve.settings import ServeSettings

ROUTED = "routed experts"
_WRAPPINGS = (
    r"Call to \w+ method failed: (.*)",
    r"Worker failed with error '(.*)', please check the stack trace above for the root cause",
)


class KtftWorker:
    """Methods that vLLM adds to its worker; `collective_rpc` calls them by name, between two steps of the model.

    What they raise reaches the caller as one text, and the engine goes on; `reason_of` gives the message in it.
    """

    def ktft_set_adapter(self, path: str | None) -> dict[str, Any]:
        """Serve this adapter in place of the one before; None serves the base model. No request must be in flight.

        All is read and checked before anything changes. Keys that were computed with another adapter must be forgotten
        by the caller.

        Returns:
            what `ktft_status` has under "adapter", and the `seconds` that it took.

        Raises:
            ValueError: the adapter is damaged, is of another model, or has what cannot be served; see `ServedAdapter`.
                The one before is served on.
        """
        begin = time.perf_counter()
        model, experts = self.get_model(), current()  # type: ignore[attr-defined]
        settings, slots = ServeSettings.from_env(), slots_of(model)
        adapter, loaded = None, LoadedAdapter({}, {})
        if path is not None:
            sizes = {
                number: (each.layer.num_experts, each.layer.hidden_size, each.layer.intermediate_size)
                for number, each in experts.layers.items()
            }
            target = target_of(model, settings.max_lora_rank, sizes)
            adapter = ServedAdapter(Path(path), Path(settings.checkpoint), target)
            loaded = adapter.read()
        made = {name: layer.quant_method.stacked(loaded.linears.get(name, ())) for name, layer in slots.items()}
        experts.set_lora(loaded.experts if adapter else None, adapter.name if adapter else None)
        for name, layer in slots.items():
            layer.quant_method.put(layer, made[name])
        applied = _applied(adapter, slots, loaded.experts) if adapter else {}
        self._ktft_adapter = _describe(adapter, applied) if adapter else None
        return {"adapter": self._ktft_adapter, "seconds": time.perf_counter() - begin}

    def ktft_status(self) -> dict[str, Any]:
        """`ktft.serve.experts.ServedModel.status`, with what is known of the adapter under "adapter", None for none."""
        return current().status() | {"adapter": getattr(self, "_ktft_adapter", None)}


def reason_of(error: BaseException) -> str:
    """The message of what a worker's method raised, without what vLLM says around it."""
    text = str(error)
    for wrapping in _WRAPPINGS:
        if match := re.fullmatch(wrapping, text, re.DOTALL):
            text = match[1]
    return text


def _describe(adapter: ServedAdapter, applied: dict[str, dict[str, int]]) -> dict[str, Any]:
    return {
        "name": adapter.name,
        "path": str(adapter.saved.directory),
        "identity": adapter.identity,
        "ranks": adapter.ranks,
        "tensors": adapter.counts(),
        "applied": applied,
    }


def _applied(
    adapter: ServedAdapter, slots: dict[str, Any], experts: dict[int, ExpertLora]
) -> dict[str, dict[str, int]]:
    """Group -> modules with LoRA, and those whose B is not zero where the model computes: what the adapter does.

    A module is a linear layer as transformers has it, or one projection of a layer's routed experts.
    """
    found = {}
    for group, rows in adapter.rows().items():
        nonzero = sum(bool(torch.any(getattr(slots[name], B)[start:stop])) for name, start, stop in rows)
        found[group] = {"modules": len(rows), "nonzero": nonzero}
    pairs = [pair for lora in experts.values() for pair in lora.pairs.values()]
    if pairs:
        found[ROUTED] = {"modules": len(pairs), "nonzero": sum(bool(torch.any(pair.b)) for pair in pairs)}
    return found
