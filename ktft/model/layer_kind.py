"""What makes decoder layers alike: layers of one kind run the same kernels, on weights of their own.

A recording of kernels knows addresses, not layers. So a kind has one set of tensors for weights, from which its
recordings read, and a layer's weights are copied there before they are used: for a layer of Qwen3-30B-A3B these are
36 MB, which a GPU copies in some microseconds.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ktft.dense.linear import PackedLinear
from ktft.model.experts import find_experts

_NUMBERS = frozenset({"layer_idx", "layer_number"})
"""Attributes that number a layer. Whether something else depends on them shows when a recording is checked."""
_STATES = ("_active_adapter", "_disable_adapters", "merged_adapters")
"""Private attributes of PEFT's layers that change what they compute."""


_PLACE = re.compile(r"(?<=\.)\d+(?=\.)")


class Unlike(Exception):
    """Why a layer cannot be recorded."""


class Weights:
    """The parameters and buffers of a layer around its experts, each with the module that has it.

    Attributes:
        layer: the layer.
        entry: the module through which the layer calls its experts; None if it has none.

    Raises:
        Unlike: a recording could not use them.
    """

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self.layer = layer
        experts = [name.removesuffix(".base_layer") for name in find_experts(layer)]
        if len(experts) > 1:
            raise Unlike("it calls routed experts more than once")
        self.entry = layer.get_submodule(experts[0]) if experts else None
        self._modules = [
            (name, each)
            for name, each in layer.named_modules()
            if each is self.entry or not any(name.startswith(f"{other}.") for other in experts)
        ]
        self.places = [
            (own, name)
            for _, module in self._modules
            if module is not self.entry
            for own in (module._parameters, module._buffers)
            for name, tensor in own.items()
            if tensor is not None
        ]
        self._adapted = [each for _, each in self._modules if not vars(each).keys().isdisjoint(_STATES)]
        packed = {id(each._parameters): each for _, each in self._modules if isinstance(each, PackedLinear)}
        self._streamed = {
            at: packed[id(own)]
            for at, (own, name) in enumerate(self.places)
            if name == "weight" and id(own) in packed and packed[id(own)].is_streamed
        }
        for tensor in self.tensors:
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.device != device:
                raise Unlike(f"it has a {type(tensor).__name__} on {tensor.device}")
            if tensor._backward_hooks:
                raise Unlike("a parameter has hooks of its gradient")

    @property
    def tensors(self) -> list[Tensor]:
        """The weights, in the order of `places`."""
        return [own[name] for own, name in self.places]

    def present(self) -> list[Tensor]:
        """The weights, of which those that lie in host memory are on the device until another layer is asked for."""
        found = self.tensors
        for at, module in self._streamed.items():
            found[at] = module.streamed()
        return found

    @property
    def trained(self) -> list[Tensor]:
        """Those that are trained, each once."""
        return _trained(self.tensors)

    def state(self) -> tuple[object, ...]:
        """What must not change while a layer is of its kind, and is quick to ask for."""
        weights = [(id(tensor), tensor.requires_grad) for tensor in self.tensors]
        adapters = [str(vars(each).get(name)) for each in self._adapted for name in _STATES]
        return (*weights, *adapters, *[each.training for _, each in self._modules])

    def signature(self) -> tuple[object, ...]:
        """Equal for layers of one kind, apart from what only `_NUMBERS` say."""
        tensors = [(each.shape, each.stride(), each.dtype, each.requires_grad) for each in self.tensors]
        modules = [(name, type(each), each.training, *_attributes(each)) for name, each in self._modules]
        return (*tensors, *modules)

    @contextlib.contextmanager
    def replaced(self, by: list[Tensor]) -> Iterator[None]:
        """A block in which the layer has these tensors in place of its own."""
        before = self.tensors
        try:
            for (own, name), tensor in zip(self.places, by, strict=True):
                own[name] = tensor
            yield
        finally:
            for (own, name), tensor in zip(self.places, before, strict=True):
                own[name] = tensor


class SharedWeights:
    """The tensors for weights of a kind's layers.

    Attributes:
        tensors: in the order of `Weights.places`; those that are trained take gradients.
    """

    def __init__(self, like: Weights) -> None:
        alike: dict[int, Tensor] = {}  # a tensor that a layer has twice stays one
        tensors = like.present()
        for tensor in tensors:
            if id(tensor) not in alike:
                alike[id(tensor)] = tensor.detach().clone(memory_format=torch.preserve_format)
                alike[id(tensor)].requires_grad_(tensor.requires_grad)
        self.tensors = [alike[id(tensor)] for tensor in tensors]
        self._holds: Weights | None = None
        kinds = [each.dtype for each in self.tensors]
        self._alike = [[at for at, each in enumerate(kinds) if each == kind] for kind in dict.fromkeys(kinds)]

    @property
    def trained(self) -> list[Tensor]:
        """Those that are trained, each once."""
        return _trained(self.tensors)

    def forget(self) -> None:
        """Weights may have changed, with or without a sign to autograd."""
        self._holds = None

    def hold(self, weights: Weights) -> None:
        """Copy a layer's weights to the kind's tensors, unless they are there since `forget`."""
        if weights is not self._holds:
            now = weights.present()
            with torch.no_grad():
                for alike in self._alike:  # tensors of several types would be copied one by one
                    torch._foreach_copy_([self.tensors[at] for at in alike], [now[at] for at in alike])
            self._holds = weights


def _trained(tensors: list[Tensor]) -> list[Tensor]:
    return list({id(each): each for each in tensors if each.requires_grad}.values())


def _attributes(module: nn.Module) -> Iterator[object]:
    """What a module's code may depend on, besides its tensors and modules."""
    for name, value in sorted(vars(module).items()):
        if name in _STATES or not (name.startswith("_") or name in _NUMBERS):
            yield name, _plain(value)
    for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks):
        yield tuple(map(_plain, hooks.values()))


def _plain(value: object) -> object:
    """A value that can be compared; of objects it is only their type, and names of modules lack the layer's number."""
    if isinstance(value, str):
        return _PLACE.sub("#", value)
    if isinstance(value, bool | int | float | torch.dtype | type(None)):
        return value
    if isinstance(value, functools.partial):
        return _plain(value.func)
    if isinstance(value, dict):
        return tuple((str(key), _plain(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return getattr(value, "__qualname__", type(value).__qualname__)
