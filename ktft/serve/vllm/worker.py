"""What vLLM's worker can be asked to do with ktft's part of the model: `--worker-extension-cls`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ktft.checkpoint.families import GROUPS
from ktft.lora import ExpertLora
from ktft.serve.runtime.adapter import LoadedAdapter, ServedAdapter
from ktft.serve.runtime.served_model import MIXED, current
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm.lora_linear import slots_of, target_of

Linears = Mapping[str, tuple[Tensor, Tensor]]
"""LoRA on linear layers, by slot; see `KtftLinearMethod.stacked`."""
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

        All is read and checked, and memory taken, before anything changes; if something fails after that, the one
        before is put back. Keys that were computed with another adapter must be forgotten by the caller.

        Returns:
            `describe` of it under "adapter", None for the base model, and the `seconds` that it took.

        Raises:
            ValueError: the adapter is damaged, is of another model, or has what cannot be served; see `ServedAdapter`.
                The one before is served on.
            RuntimeError: memory ran out, for instance. The one before is served on, unless the message has `MIXED`.
        """
        begin = time.perf_counter()
        adapter = set_adapter(self.get_model(), path)  # type: ignore[attr-defined]
        return {"adapter": adapter, "seconds": time.perf_counter() - begin}

    def ktft_status(self) -> dict[str, Any]:
        """`ktft.serve.runtime.served_model.ServedModel.status`; "adapter" is what `describe` says, None for none."""
        return current().status()


def set_adapter(model: nn.Module, path: str | None) -> dict[str, Any] | None:
    """Put an adapter into the model that this process computes, in place of the one before; None takes that out.

    Returns:
        `describe` of it.

    Raises:
        ValueError, RuntimeError: see `KtftWorker.ktft_set_adapter`.
    """
    experts, slots = current(), slots_of(model)
    adapter, loaded = None, LoadedAdapter({}, {})
    if path is not None:
        settings = ServeSettings.from_env()
        sizes = {
            number: (each.layer.num_experts, each.layer.hidden_size, each.layer.intermediate_size)
            for number, each in experts.layers.items()
        }
        target = target_of(model, settings.max_lora_rank, sizes)
        adapter = ServedAdapter(Path(path), Path(settings.checkpoint), target)
        loaded = adapter.read()
    made = {name: layer.quant_method.stacked(loaded.linears.get(name, ())) for name, layer in slots.items()}
    description = describe(adapter, made, loaded.experts) if adapter else None
    before = experts.loras(), experts.adapter, {name: layer.quant_method.held(layer) for name, layer in slots.items()}
    ready = {name: layer.quant_method.ready(made[name]) for name, layer in slots.items()}

    def put(lora: Mapping[int, ExpertLora] | None, about: Mapping[str, Any] | None, linears: Linears) -> None:
        experts.set_lora(lora, about)
        for name, layer in slots.items():
            layer.quant_method.put(layer, linears[name])

    try:
        put(loaded.experts if adapter else None, description, ready)
    except Exception as error:
        try:
            put(*before)
        except Exception as again:
            raise RuntimeError(
                f"{MIXED}: {error}; and the one before could not be put back: {again}. Nothing is served until an "
                "adapter is loaded, or unloaded, without an error"
            ) from error
        raise
    return description


def reason_of(error: BaseException) -> str:
    """The message of what a worker's method raised, without what vLLM says around it."""
    text = str(error)
    for wrapping in _WRAPPINGS:
        if match := re.fullmatch(wrapping, text, re.DOTALL):
            text = match[1]
    return text


def describe(adapter: ServedAdapter, linears: Linears, experts: Mapping[int, ExpertLora]) -> dict[str, Any]:
    """What an adapter is, and what of it is put into the model; JSON's values.

    `tensors` has the tensors of its file by group of the model's parameters. `applied` has the modules with LoRA, and
    those whose B is not zero as the model gets it; a module is a linear layer as transformers has it, or a projection
    of a layer's routed experts.

    Args:
        linears: what each slot gets.
        experts: what each layer's routed experts get.
    """
    effects = {
        group: [bool(torch.any(linears[name][1][start:stop])) for name, start, stop in rows]
        for group, rows in adapter.rows().items()
    }
    if pairs := [pair for lora in experts.values() for pair in lora.pairs.values()]:
        effects[GROUPS[2]] = [bool(torch.any(pair.b)) for pair in pairs]
    return {
        "name": adapter.name,
        "path": str(adapter.saved.directory),
        "identity": adapter.identity,
        "ranks": adapter.ranks,
        "tensors": adapter.counts(),
        "applied": {group: {"modules": len(each), "nonzero": sum(each)} for group, each in effects.items()},
    }
