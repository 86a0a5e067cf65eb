"""One adapter from the experts of all ranks: rank 0 gets the LoRA that the others hold, and writes it as one file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ktft.adapters.lora import KtftExpertsLora
from ktft.held import HeldExperts
from ktft.ranks.group import Ranks, ranks


def split_layers(model: nn.Module) -> dict[str, KtftExpertsLora]:
    """Module name -> layer, for the routed experts with LoRA that several ranks hold together."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, KtftExpertsLora))
    return {name: layer for name, layer in found if layer.experts.number is not None}


@contextmanager
def gathered(model: nn.Module) -> Iterator[bool]:
    """A block in which rank 0 has the LoRA of all experts. All ranks must enter it. Yields whether this rank writes.

    It takes memory for one more copy of the adapter on rank 0. Blocks may be nested; only the first gathers.
    """
    layers = [layer for layer in split_layers(model).values() if not layer.whole]
    if not layers:
        yield not split_layers(model) or ranks().first
        return
    together = ranks()
    for layer in layers:
        _gather(layer, together)
    try:
        yield together.first
    finally:
        for layer in layers:
            layer.whole.clear()


def _gather(layer: KtftExpertsLora, together: Ranks) -> None:
    """Fill `layer.whole`; on ranks that do not write, with empty tensors."""
    held = together.gather(layer.experts.held)
    for adapter in layer.lora_A:
        for kind, projection, tensor in layer.tensors(adapter):
            layer.whole[kind, adapter, projection] = _whole(tensor.detach(), held, together)


def _whole(own: Tensor, held: list[HeldExperts], together: Ranks) -> Tensor:
    if not together.first:
        together.send_to_first(own)
        return own.new_empty(0)
    found = own.new_empty(held[0].num_experts, *own.shape[1:])
    for rank, each in enumerate(held):
        part = own if rank == 0 else together.receive(own.new_empty(each.count, *own.shape[1:]), rank)
        found[torch.tensor(each.numbers)] = part
    return found
