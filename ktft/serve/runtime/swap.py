"""Putting another adapter into a server's model: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ktft.lora import ExpertLora
from ktft.serve.runtime.served_adapter import LoadedAdapter, ServedAdapter, SliceLora
from ktft.serve.runtime.served_model import MIXED, ServedModel

AB = tuple[Tensor, Tensor]
"""LoRA of a linear layer as its engine holds it. The second tensor has the rows of the layer's output."""


class LinearSlot(Protocol):
    """A linear layer of the engine's model that applies LoRA."""

    def stacked(self, slices: Sequence[SliceLora]) -> AB:
        """The tensors for LoRA on these rows of the output, in CPU memory; also for no rows."""

    def ready(self, tensors: AB) -> AB:
        """The same tensors where `put` needs no more memory of the device for them."""

    def held(self) -> AB:
        """What is applied now, so that `put` can apply it again, whatever was put in between."""

    def put(self, tensors: AB) -> None:
        """Apply these tensors from now on. Nothing may be computing. Tensors that are `ready` take no memory."""


def swap_adapter(
    adapter: ServedAdapter | None, experts: ServedModel, slots: Mapping[str, LinearSlot]
) -> dict[str, Any] | None:
    """Serve this adapter in place of the one before; None serves the base model. Nothing may be computing.

    Everything is read and checked, and memory is taken, before anything changes. If something fails after that, the
    adapter before is put back.

    Args:
        adapter, experts: what to serve, and the model's routed experts.
        slots: the linear layers that apply LoRA, by the engine's names.

    Returns:
        `ServedAdapter.describe`; None for the base model.

    Raises:
        ValueError: a tensor is damaged, or the adapter does not fit. The one before is still served.
        RuntimeError: memory ran out, for instance. The one before is still served, unless the message has `MIXED`.
    """
    loaded = adapter.read() if adapter else LoadedAdapter({}, {})
    made = {name: slot.stacked(loaded.linears.get(name, ())) for name, slot in slots.items()}
    description = adapter.describe(made, loaded.experts) if adapter else None
    before = experts.loras(), experts.adapter, {name: slot.held() for name, slot in slots.items()}
    ready = {name: slot.ready(made[name]) for name, slot in slots.items()}

    def put(lora: Mapping[int, ExpertLora] | None, about: Mapping[str, Any] | None, linears: Mapping[str, AB]) -> None:
        experts.set_lora(lora, about)
        for name, slot in slots.items():
            slot.put(linears[name])

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
