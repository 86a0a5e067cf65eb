"""Several micro-batches go through a model's decoder layers together, so that an expert is needed once for all.

The usual order takes a micro-batch through the whole model, forward and backward, before the next. Here all of them go
through a layer before the next layer. Each runs the stock code with its own tokens, in lockstep: it waits where it
calls the routed experts, and these run once, on the tokens of all. The graph of autograd is cut at each decoder layer.
So the loss of each micro-batch is computed and goes backward by itself, down to the last layer's output; then the
layers go backward, last first. A layer that is checkpointed is run again then. Within a layer, each micro-batch goes
backward to the experts, these go backward once for all, and each micro-batch goes on to the layer's input: only one at
a time needs memory for gradients of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import output_capturing

from ktft.model.experts import KtftExperts, decoder_lists
from ktft.model.lockstep import Cut, Lockstep, RandomState, current

Result = TypeVar("Result")

_CACHES = ("past_key_values", "past_key_value", "layer_past")
_collector: Any = getattr(output_capturing, "_active_collector", None)
"""Where transformers collects what a model returns beside its output, such as router logits."""


def obstacle(model: nn.Module) -> str | None:
    """Why a model's micro-batches cannot go through its layers together; None if they can."""
    if _collector is None:
        return "this version of transformers collects router logits in another way"
    for name, layer in decoder_layers(model).items():
        if not isinstance(layer, GradientCheckpointingLayer):
            return f"{name} is a {type(layer).__name__}, which transformers cannot checkpoint"
    return None


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> decoder layer, of every list of layers that has routed experts in one of them."""
    return {
        f"{name}.{number}": layer
        for name in decoder_lists(model)
        for number, layer in model.get_submodule(name).named_children()
    }


def call_layer(original: Callable[..., Any], layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A call of any layer that transformers can checkpoint; decoder layers of a run in lockstep are cut off here."""
    member = current()
    batch: _MicroBatch | None = None if member is None else member.data
    if batch is None or layer not in batch.layers or not torch.is_grad_enabled():
        return original(layer, *args, **kwargs)
    return batch.call(layer, args, kwargs)


@dataclass
class _MicroBatch:
    """One micro-batch's way through the layers.

    Attributes:
        leaves: id of a tensor that the model gave to layers -> that tensor, what the layers got in its place, and the
            number of the first call that got it.
    """

    layers: frozenset[nn.Module]
    calls: list[_Call] = field(default_factory=list)
    leaves: dict[int, tuple[Tensor, Tensor, int]] = field(default_factory=dict)

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer on its inputs, cut off from what made them. Returns its outputs, cut off from the layer."""
        kwargs |= {name: None for name in _CACHES if kwargs.get(name) is not None}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        flat, spec = _pytree.tree_flatten((args, kwargs))
        given = [self._leaf(each) if isinstance(each, Tensor) and each.requires_grad else each for each in flat]
        call = _Call(layer, given, spec)
        out = call.first()
        self.calls.append(call)
        return out

    def _leaf(self, tensor: Tensor) -> Tensor:
        if tensor.is_leaf:
            return tensor
        if id(tensor) not in self.leaves:
            self.leaves[id(tensor)] = tensor, tensor.detach().requires_grad_(), len(self.calls)
        return self.leaves[id(tensor)][1]

    def pass_on(self, number: int) -> None:
        """Send gradients of the tensors that call `number` was the first to get to what made them."""
        own = [key for key, (_, leaf, first) in self.leaves.items() if first == number]
        ready = [(made, leaf.grad) for made, leaf, _ in map(self.leaves.pop, own) if leaf.grad is not None]
        if ready:  # what lies between layers may have a part in common, such as the features of an image
            _backward(ready, retain_graph=True)


@dataclass
class _Call:
    """One call of a decoder layer.

    Attributes:
        given: the flat arguments, of which those with gradients are leaves.
        results: the leaves that the model got in place of the outputs: first those returned, then those collected.
        made: the outputs themselves, in the same order; None until the layer has been run with gradients.
    """

    layer: nn.Module
    given: list[Any]
    spec: Any
    results: list[Tensor] = field(default_factory=list)
    made: list[Tensor] | None = None
    cuts: list[Cut] = field(default_factory=list)  # its experts
    random: RandomState = ()
    contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)  # how much the model had collected before

    @property
    def reached(self) -> bool:
        """Whether a gradient has come to one of its outputs."""
        return any(leaf.grad is not None for leaf in self.results)

    def first(self) -> Any:
        """Run the layer for the first time, without gradients if it is checkpointed. Returns leaves as its outputs."""
        again = bool(getattr(self.layer, "gradient_checkpointing", False)) and self.layer.training
        member = current()
        assert member is not None
        member.cuts = None if again else self.cuts
        if again:
            self.random, self.contexts = member.random_state(), list(_autocast(self.given))
        lists = _collector.get() or {}
        self.marks = {key: len(found) for key, found in lists.items()}
        with torch.set_grad_enabled(not again):
            out = self._run()
        member.cuts = None
        flat, spec = _pytree.tree_flatten(out)
        places = [(flat, at) for at in range(len(flat))]
        places += [(found, at) for key, found in lists.items() for at in range(self.marks[key], len(found))]
        trains = again and (
            any(isinstance(each, Tensor) and each.requires_grad for each in self.given)
            or any(parameter.requires_grad for parameter in self.layer.parameters())
        )
        made = []
        for where, at in places:
            tensor = where[at]
            if isinstance(tensor, Tensor) and (tensor.requires_grad or (trains and tensor.is_floating_point())):
                made.append(tensor)
                where[at] = tensor.detach().requires_grad_()
                self.results.append(where[at])
        self.made = None if again else made
        return _pytree.tree_unflatten(flat, spec)

    def again(self) -> None:
        """Run the layer again, with gradients."""
        member = current()
        assert member is not None
        member.cuts = self.cuts
        lists: dict[str, list[Any]] = {key: [None] * mark for key, mark in self.marks.items()}
        token = _collector.set(lists)
        try:
            with ExitStack() as stack:
                for context in self.contexts:
                    stack.enter_context(context())
                out = self._run()
        finally:
            _collector.reset(token)
        flat = [*_pytree.tree_leaves(out), *(each for found in lists.values() for each in found if each is not None)]
        self.made = [each for each in flat if isinstance(each, Tensor) and each.is_floating_point()]

    def _run(self) -> Any:
        args, kwargs = _pytree.tree_unflatten(self.given, self.spec)
        return nn.Module.__call__(self.layer, *args, **kwargs)

    def ends(self) -> list[tuple[Tensor, Tensor]]:
        """The outputs that gradients have come to, and these; then the inputs of the experts that they have come to."""
        assert self.made is not None
        pairs = zip(self.made, self.results, strict=True)
        outputs = [(made, leaf.grad) for made, leaf in pairs if leaf.grad is not None and made.requires_grad]
        return outputs + [end for cut in self.cuts for end in cut.reached()]

    def to_experts(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """Go backward to one of the experts. Returns their output and its gradient, if they get one."""
        if number >= len(self.cuts) or not (ends := self.ends()):
            return []
        cut, (tensors, grads) = self.cuts[number], zip(*ends, strict=True)
        (grad,) = torch.autograd.grad(tensors, [cut.given], grads, retain_graph=True, allow_unused=True)
        return [] if grad is None else [(cut.out, grad)]


class LayerOrder:
    """Runs micro-batches of a model together, which must have no `obstacle`."""

    def __init__(self, model: nn.Module, lockstep: Lockstep) -> None:
        layers = decoder_layers(model).values()
        self._layers = frozenset(layers)
        self._sparse = frozenset(
            layer for layer in layers if any(isinstance(module, KtftExperts) for module in layer.modules())
        )
        self.lockstep = lockstep

    def run(self, works: Sequence[Callable[[], Result]], states: Sequence[RandomState]) -> list[Result]:
        """Run the training steps of micro-batches, forward and backward. Returns what they return.

        Args:
            works: the steps.
            states: the random numbers that each begins with.

        Raises:
            BaseException: what the first of them raised.
        """
        batches = [_MicroBatch(self._layers) for _ in works]
        going = [partial(_in, batch, work) for batch, work in zip(batches, works, strict=True)]
        results = self.lockstep.run(going, states)
        last = max(len(batch.calls) for batch in batches)
        for number in reversed(range(last)):
            here = [batch for batch in batches if len(batch.calls) > number]
            calls = [batch.calls[number] for batch in here]
            if all(call.layer in self._sparse for call in calls):
                self._backward(calls)
            else:  # they have nothing in common, and one at a time takes less memory
                for call in calls:
                    self._backward([call])
            for batch in here:
                batch.calls.pop()
                batch.pass_on(number)
        return results

    def _backward(self, calls: Sequence[_Call]) -> None:
        calls = [call for call in calls if call.reached]
        again = [call for call in calls if call.made is None]
        self.lockstep.run([call.again for call in again], [call.random for call in again])
        for number in reversed(range(max((len(call.cuts) for call in calls), default=0))):
            if ends := [end for call in calls for end in call.to_experts(number)]:
                _backward(ends)
        for call in calls:
            if ends := call.ends():
                _backward(ends)


def _in(batch: _MicroBatch, work: Callable[[], Result]) -> Result:
    member = current()
    assert member is not None
    member.data = batch
    return work()


def _backward(ends: Sequence[tuple[Tensor, Tensor]], retain_graph: bool = False) -> None:
    """Send gradients backward from these tensors."""
    tensors, grads = zip(*ends, strict=True)
    torch.autograd.backward(tensors, grads, retain_graph=retain_graph)


def _autocast(given: Sequence[Any]) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """The contexts of autocast that are in force, to enter them again."""
    for kind in dict.fromkeys(["cpu", *(each.device.type for each in given if isinstance(each, Tensor))]):
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            yield partial(torch.autocast, kind, torch.get_autocast_dtype(kind), True, torch.is_autocast_cache_enabled())
