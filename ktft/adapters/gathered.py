"""One adapter from the parts of all ranks: rank 0 gets what the others hold, and writes it as one file.

Ranks have different experts, with FSDP2 different rows of all other parameters, and with tensor parallelism pieces of
some.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn

from ktft.adapters.lora import KtftExpertsLora
from ktft.adapters.tensor_parallel import divided_layers
from ktft.held import HeldExperts
from ktft.model.experts import ranks_of
from ktft.ranks.group import Ranks, ranks
from ktft.ranks.sharded import divide_again, is_divided, is_sharded, take_rows, whole


def split_layers(model: nn.Module) -> dict[str, KtftExpertsLora]:
    """Module name -> layer, for the routed experts with LoRA that several ranks hold together."""
    found = ((name, module) for name, module in model.named_modules() if isinstance(module, KtftExpertsLora))
    return {name: layer for name, layer in found if layer.experts.number is not None}


@contextmanager
def gathered(model: nn.Module) -> Iterator[bool]:
    """A block in which rank 0 has the LoRA of all experts, and adapters and what else is trained as whole tensors.

    All ranks must enter it. Yields whether this rank writes. It takes memory for one more copy of these on rank 0.
    Blocks may be nested; only the first gathers.
    """
    together = ranks_of(model)
    layers = [layer for layer in split_layers(model).values() if not layer.whole]
    pieces = [(linear, own) for linear, own in divided_layers(model).values() if not own.whole]
    with made_whole(model, first_only=True):
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
        for kind, projection, tensor in layer.stacks(adapter):
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


# --- parameters that FSDP2 divides ------------------------------------------------------------------------------------


@contextmanager
def made_whole(model: nn.Module, first_only: bool = False) -> Iterator[Ranks | None]:
    """A block in which the model has ordinary tensors in CPU memory for what it trains and for adapters.

    All ranks must enter it; the model cannot run in it. What the block writes into them is kept. Yields the ranks; None
    if there was nothing to gather.

    Args:
        first_only: ranks other than 0 get empty tensors, and what is written is not kept.
    """
    divide_again(model)
    places = list(_divided(model))
    if not places:
        yield None
        return
    together, made = ranks(), {}
    for module, name, parameter in places:
        if id(parameter) not in made:
            made[id(parameter)] = _ordinary(parameter, together, first_only)
        module._parameters[name] = made[id(parameter)]
    hooks = {module: module._load_state_dict_post_hooks for module, _, _ in places}
    for module in hooks:  # FSDP2's, which look for parts
        module._load_state_dict_post_hooks = OrderedDict()
    try:
        yield together
        if not first_only:
            with torch.no_grad():
                for module, name, parameter in places:
                    take_rows(parameter, module._parameters[name], together)  # type: ignore[arg-type]
    finally:
        for module, name, parameter in places:
            module._parameters[name] = parameter
        for module, held in hooks.items():
            module._load_state_dict_post_hooks = held


def _divided(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Module, name and value of each parameter to be gathered: other frozen ones of the base model stay divided."""
    if not is_divided(model):
        return
    saved = {id(each) for module in model.modules() if isinstance(module, PeftModel) for each in _chosen(module)}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and is_sharded(parameter):
                adapter = ".lora_" in f".{path}.{name}" or ".modules_to_save." in f".{path}."
                if parameter.requires_grad or adapter or id(parameter) in saved:
                    yield module, name, parameter


def _chosen(adapted: PeftModel) -> Iterator[Tensor]:
    """What PEFT saves of a model, embeddings of a resized vocabulary among it."""
    experts = tuple(f"{name}.lora_" for name in split_layers(adapted))
    every = adapted.state_dict(keep_vars=True)
    state = {name: tensor for name, tensor in every.items() if not name.startswith(experts)}
    for name in adapted.peft_config:
        yield from get_peft_model_state_dict(adapted, state_dict=state, adapter_name=name).values()


def _ordinary(parameter: nn.Parameter, together: Ranks, first_only: bool) -> nn.Parameter:
    found = whole(parameter, together)
    found = found.new_empty(0, device="cpu") if first_only and not together.first else found.to("cpu", copy=True)
    return nn.Parameter(found, parameter.requires_grad)
