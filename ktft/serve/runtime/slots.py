"""Putting an adapter into a server's model, beside others, and taking it out: all of it, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from ktft.serve.runtime.served_adapter import ServedAdapter, SliceLora
from ktft.serve.runtime.served_model import ServedModel

AB = tuple[Tensor, Tensor]
"""LoRA of a linear layer as its engine holds it. The second tensor has the rows of the layer's output."""


class SharedSlot(Protocol):
    """A linear layer of the engine's model that applies to each token LoRA of its own adapter."""

    def stacked(self, slices: Sequence[SliceLora]) -> AB:
        """The tensors for LoRA on these rows of the output, in CPU memory; also for no rows."""

    def joined(self, number: int, tensors: AB) -> Any:
        """What `share` takes to apply these tensors, too, to tokens of the adapter of this number."""

    def parted(self, number: int) -> Any:
        """What `share` takes to apply all but those of this adapter."""

    def share(self, state: Any) -> None:
        """Apply this from now on. Nothing may be computing. It takes no memory and does not fail."""


def add_adapter(
    number: int, adapter: ServedAdapter, experts: ServedModel, slots: Mapping[str, SharedSlot]
) -> dict[str, Any]:
    """Serve an adapter beside those that are served, to the tokens that have its number. Nothing may be computing.

    Everything is read, checked and made before anything changes; what is left then cannot fail.

    Args:
        number, experts: see `ServedModel.add_adapter`.
        adapter: what to serve.
        slots: the linear layers that apply LoRA, by the engine's names.

    Returns:
        `ServedAdapter.describe`.

    Raises:
        ValueError: a tensor is damaged, or the adapter does not fit. Nothing has changed.
        RuntimeError: memory ran out, for instance. Nothing has changed.
    """
    loaded = adapter.read()
    made = {name: slot.stacked(loaded.linears.get(name, ())) for name, slot in slots.items()}
    description = adapter.describe(made, loaded.experts)
    joined = {name: slots[name].joined(number, made.pop(name)) for name in loaded.linears}
    experts.add_adapter(number, loaded.experts, description)
    for name, state in joined.items():
        slots[name].share(state)
    return description


def remove_adapter(number: int, experts: ServedModel, slots: Mapping[str, SharedSlot]) -> None:
    """Serve an adapter no longer. Nothing may be computing. Raises RuntimeError without memory; nothing has changed."""
    parted = {name: slot.parted(number) for name, slot in slots.items()}
    experts.remove_adapter(number)
    for name, state in parted.items():
        slots[name].share(state)
