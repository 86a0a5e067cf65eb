"""One micro-batch's call of a decoder layer, cut off from the graph of autograd before and behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ktft.model import collected
from ktft.model.lockstep import Cut, RandomState, current


@dataclass
class PlainCall:
    """A call that runs the layer's own code, forward and backward, in lockstep with those of other micro-batches.

    Attributes:
        layer: the decoder layer.
        given: the flat arguments, of which those with gradients are leaves.
        results: the leaves that the model got in place of the outputs: first those returned, then those collected. Of
            a call that `waits`, those and `given` may be away (`ktft.model.away`) until its way back.
        made: the outputs themselves, in the same order; None until the layer has been run with gradients.
        random: the random numbers that the layer begins with.
        stored: whether the layer keeps its activations, though it is checkpointed.
        link: what the experts know the call by, in both passes if it is run again.
    """

    layer: nn.Module
    given: list[Any]
    spec: Any
    results: list[Any] = field(default_factory=list)
    made: list[Tensor] | None = None
    cuts: list[Cut] = field(default_factory=list)  # its experts
    random: RandomState = ()
    contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)  # how much the model had collected before
    stored: bool = False
    link: object = field(default_factory=object)

    @property
    def reached(self) -> bool:
        """Whether a gradient has come to one of its outputs."""
        return any(leaf.grad is not None for leaf in self.results)

    @property
    def waits(self) -> bool:
        """Whether `again` must come before the way back."""
        return self.made is None

    @property
    def experts(self) -> int:
        """How often it called routed experts, since `again` if that must come."""
        return len(self.cuts)

    def first(self) -> Any:
        """Run the layer for the first time, without gradients if it is run again. Returns leaves as its outputs."""
        again = is_checkpointed(self.layer) and not self.stored
        member = current()
        assert member is not None
        member.cuts, member.link = None if again else self.cuts, self.link
        if again:
            self.random, self.contexts = member.random_state(), list(autocast_of(self.given))
        lists = collected.lists()
        self.marks = {key: len(found) for key, found in lists.items()}
        with torch.set_grad_enabled(not again):
            out = self._run()
        member.cuts = member.link = None
        flat, spec = _pytree.tree_flatten(out)
        places = [(flat, at) for at in range(len(flat))]
        places += [(found, at) for key, found in lists.items() for at in range(self.marks[key], len(found))]
        trained = again and trains(self.layer, self.given)
        made = []
        for where, at in places:
            tensor = where[at]
            if isinstance(tensor, Tensor) and (tensor.requires_grad or (trained and tensor.is_floating_point())):
                made.append(tensor)
                where[at] = tensor.detach().requires_grad_()
                self.results.append(where[at])
        self.made = None if again else made
        return _pytree.tree_unflatten(flat, spec)

    def again(self) -> None:
        """Run the layer again, with gradients."""
        member = current()
        assert member is not None
        member.cuts, member.link = self.cuts, self.link
        with ExitStack() as stack:
            lists = stack.enter_context(collected.into({key: [None] * mark for key, mark in self.marks.items()}))
            for context in self.contexts:
                stack.enter_context(context())
            out = self._run()
        flat = [*_pytree.tree_leaves(out), *(each for found in lists.values() for each in found if each is not None)]
        self.made = [each for each in flat if isinstance(each, Tensor) and each.is_floating_point()]

    def _run(self) -> Any:
        args, kwargs = _pytree.tree_unflatten(self.given, self.spec)
        return nn.Module.__call__(self.layer, *args, **kwargs)

    def _ends(self) -> list[tuple[Tensor, Tensor]]:
        """The outputs that gradients have come to, and these; then the inputs of the experts that they have come to."""
        assert self.made is not None
        pairs = zip(self.made, self.results, strict=True)
        outputs = [(made, leaf.grad) for made, leaf in pairs if leaf.grad is not None and made.requires_grad]
        return outputs + [end for cut in self.cuts for end in cut.reached()]

    def to_experts(self, number: int) -> list[tuple[Tensor, Tensor]]:
        """Go backward to one of the experts. Returns their output and its gradient, if they get one."""
        if number >= len(self.cuts) or not (ends := self._ends()):
            return []
        cut, (tensors, grads) = self.cuts[number], zip(*ends, strict=True)
        (grad,) = torch.autograd.grad(tensors, [cut.given], grads, retain_graph=True, allow_unused=True)
        return [] if grad is None else [(cut.out, grad)]

    def finish(self) -> None:
        """Go backward to the layer's inputs, once its experts did."""
        if ends := self._ends():
            send_back(ends)


def send_back(ends: Sequence[tuple[Tensor, Tensor]], retain_graph: bool = False) -> None:
    """Send gradients backward from these tensors."""
    tensors, grads = zip(*ends, strict=True)
    torch.autograd.backward(tensors, grads, retain_graph=retain_graph)


def is_checkpointed(layer: nn.Module) -> bool:
    """Whether a layer is run again for its backward."""
    return bool(getattr(layer, "gradient_checkpointing", False)) and layer.training


def trains(layer: nn.Module, given: Sequence[Any]) -> bool:
    """Whether gradients go through a layer's outputs."""
    return any(isinstance(each, Tensor) and each.requires_grad for each in given) or any(
        parameter.requires_grad for parameter in layer.parameters()
    )


def autocast_of(given: Sequence[Any]) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """The contexts of autocast that are in force, to enter them again."""
    for kind in dict.fromkeys(["cpu", *(each.device.type for each in given if isinstance(each, Tensor))]):
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            yield partial(torch.autocast, kind, torch.get_autocast_dtype(kind), True, torch.is_autocast_cache_enabled())
