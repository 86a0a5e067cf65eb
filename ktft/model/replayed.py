"""One micro-batch's call of a decoder layer, by recordings of its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ktft import spans
from ktft.device import device_of
from ktft.lanes.lanes import tell_hooks
from ktft.model import collected
from ktft.model.layer_call import PlainCall, autocast_of, trains
from ktft.model.layer_kind import Weights
from ktft.model.lockstep import RandomState, current
from ktft.model.recorder import LayerRecorder
from ktft.model.recording import Asked, Outputs, Recording, Second


class ReplayedCall:
    """A call that plays back what was recorded, around the experts, which run as always.

    The arguments are those of `LayerRecorder.recording`, and what it found. `number` is the layer's.
    """

    def __init__(
        self,
        recorder: LayerRecorder,
        number: int,
        layer: nn.Module,
        given: list[Any],
        spec: Any,
        found: tuple[Weights, Recording],
    ) -> None:
        self.layer, self.given, self.random = layer, given, RandomState()
        self._recorder, self._number, self._spec, (self._weights, self._recording) = recorder, number, spec, found
        self._link = object()
        self._results: list[Tensor] = []
        self._contexts: list[Callable[[], AbstractContextManager[Any]]] = []
        self._marks: dict[Any, int] = {}
        self._second: Second | None = None
        self._plain: PlainCall | None = None  # takes over if the second pass cannot be recorded
        self._leaves: list[Any] = []  # what the experts got in the second pass
        self._out: Tensor | None = None  # and what they made of it
        self._device = device_of(self._recording.kind.tensors[0].device)

    @property
    def reached(self) -> bool:
        return any(leaf.grad is not None for leaf in self._results)

    @property
    def waits(self) -> bool:
        return True

    @property
    def experts(self) -> int:
        return self._plain.experts if self._plain is not None else int(self._out is not None)

    def first(self) -> Any:
        member = current()
        assert member is not None
        self.random, self._contexts, member.link = member.random_state(), list(autocast_of(self.given)), self._link
        first, lists = self._recording.first, collected.lists()
        self._marks = {key: len(found) for key, found in lists.items()}
        with torch.no_grad():
            self._begin(first.graphs)
            if first.asked.answer is not None:
                self._answer(first.asked, first.asked.leaves())
                self._play(first.graphs[1])
            member.link = None
            return self._leave(first.outputs, lists)

    def again(self) -> None:
        member = current()
        assert member is not None
        member.link = self._link
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context())
            self._again()

    def _again(self) -> None:
        reached = tuple(leaf.grad is not None for leaf in self._results)
        second = self._recorder.second(self.layer, self._weights, self._recording, reached)
        if second is None:
            self._plain = PlainCall(
                self.layer, self.given, self._spec, self._results,
                random=self.random, contexts=self._contexts, marks=self._marks, link=self._link,
            )  # fmt: skip
            self._plain.again()
            return
        self._second = second
        self._begin(second.graphs)
        if second.asked.answer is not None:
            self._leaves = second.asked.leaves()
            self._out = self._answer(second.asked, self._leaves)
            self._play(second.graphs[1])

    def to_experts(self, number: int) -> list[tuple[Tensor, Tensor]]:
        if self._plain is not None:
            return self._plain.to_experts(number)
        second = self._second
        if second is None or number > 0 or self._out is None:
            return []
        self._take_grads(second)
        self._play(second.graphs[2])
        if second.to_answer is None or not self._out.requires_grad:
            return []
        return [(self._out, second.to_answer)]

    def finish(self) -> None:
        if self._plain is not None:
            self._plain.finish()
            return
        second = self._second
        assert second is not None
        with torch.no_grad():
            if self._out is None:
                self._take_grads(second)
            asked = [leaf for leaf in self._leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
            for memory, leaf in zip(second.from_asked, asked, strict=True):
                if leaf.grad is None:
                    memory.zero_()
                else:
                    memory.copy_(leaf.grad)
            self._leaves, self._out = [], None
            self._recording.kind.hold(self._weights)
            self._play(second.graphs[-1])
            leaves = [each for each in self.given if isinstance(each, Tensor) and each.requires_grad]
            _add_grads(leaves, second.to_given)
            _add_grads(self._weights.trained, second.to_weights)

    def _begin(self, graphs: Sequence[Any]) -> None:
        """Play back the part up to the experts."""
        self._recording.kind.hold(self._weights)
        self._recording.take(self.given)
        self._play(graphs[0])

    def _play(self, graph: Any) -> None:
        with spans.device("attention", self._number, self._device.current_stream()):
            graph.replay()

    def _answer(self, asked: Asked, leaves: list[Any]) -> Tensor:
        """Call the experts, and put their answer where the recording reads it."""
        assert self._weights.entry is not None and asked.answer is not None
        args, kwargs = _pytree.tree_unflatten(leaves, asked.spec)
        out: Tensor = self._weights.entry(*args, **kwargs)
        if out.shape != asked.answer.shape or out.dtype != asked.answer.dtype:
            raise TypeError(f"routed experts gave {out.dtype} {list(out.shape)}, where their hidden states are "
                            f"{asked.answer.dtype} {list(asked.answer.shape)}")  # fmt: skip
        with torch.no_grad():
            asked.answer.copy_(out)
        return out

    def _leave(self, outputs: Outputs, lists: dict[Any, list[Any]]) -> Any:
        """Copies of the outputs, as the model gets them. Those that may get gradients are leaves."""
        trained = trains(self.layer, self.given)

        def copy(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            copied = each.detach().clone()
            if copied.is_floating_point():
                self._results.append(copied.requires_grad_(trained))
            return copied

        flat = [copy(each) for each in outputs.flat]
        for key, found in outputs.lists.items():
            lists[key] += [copy(each) for each in found]
        return _pytree.tree_unflatten(flat, outputs.spec)

    def _take_grads(self, second: Second) -> None:
        """Copy the gradients of the outputs to the recording's memory."""
        with torch.no_grad():
            for memory, at in zip(second.grads, second.ends, strict=True):
                grad = self._results[at].grad
                assert grad is not None
                memory.copy_(grad)


def _add_grads(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> None:
    """Add gradients to those that the tensors have, and call the hooks of those that have them now."""
    pairs = [(tensor, grad) for tensor, grad in zip(tensors, grads, strict=True) if grad is not None]
    more = [(tensor.grad, grad) for tensor, grad in pairs if tensor.grad is not None]
    if more:
        torch._foreach_add_(*map(list, zip(*more, strict=True)))
    for tensor, grad in pairs:
        if tensor.grad is None:
            tensor.grad = grad.clone()
        tell_hooks(tensor)
