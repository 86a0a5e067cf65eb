"""One adapter from all ranks: rank 0 gets what the others hold, LoRA of experts or in pieces, and writes one file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ktft.adapters.lora import KtftExpertsLora
from ktft.adapters.tensor_parallel import divided_layers
from ktft.held import HeldExperts
from ktft.model.experts import ranks_of
from ktft.ranks.group import Ranks


def split_layers(model: nn.Module) -> dict[str, KtftExpertsLora]:
    """Module name -> layer, for the routed experts with LoRA that several ranks hold together."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, KtftExpertsLora))
    return {name: layer for name, layer in found if layer.experts.number is not None}


@contextmanager
def gathered(model: nn.Module) -> Iterator[bool]:
    """A block in which rank 0 has the whole adapter. All ranks must enter it. Yields whether this rank writes.

    It takes memory for one more copy of the adapter on rank 0. Blocks may be nested; only the first gathers.
    """
    together = ranks_of(model)
    layers = [layer for layer in split_layers(model).values() if not layer.whole]
    pieces = [(linear, own) for linear, own in divided_layers(model).values() if not own.whole]
    if together is None:
        yield True
        return
    for layer in layers:
        _gather(layer, together)
    for linear, own in pieces:
        own.whole |= {name: shard.gather(linear.get_parameter(name)) for name, shard in own.shards.items()}
    try:
        yield together.first
    finally:
        for layer in layers:
            layer.whole.clear()
        for _, own in pieces:
            own.whole.clear()


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
