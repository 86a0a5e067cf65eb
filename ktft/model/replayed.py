"""Calls of a decoder layer, by recordings of its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ktft import spans
from ktft.device import device_of
from ktft.lanes.lanes import tell_hooks
from ktft.lanes.steady_call import go_back
from ktft.model import collected
from ktft.model.layer_call import PlainCall, autocast_of, trains
from ktft.model.layer_kind import Weights
from ktft.model.recorder import LayerRecorder
from ktft.model.recording import Asked, Outputs, Recording, Second


class ReplayedCall:
    """One micro-batch's call, which plays back what was recorded around the experts. `ReplayedLayer` runs it.

    The arguments are those of `LayerRecorder.recording`, and what it found. `number` is the layer's. Make it in the
    thread of the micro-batch, with its random numbers.

    Attributes:
        layer: the decoder layer.
        before: the random numbers that the layer begins with.
        random: those that come next in its present pass.
        results: the leaves that the model got, and other outputs with values.
        link: what the experts know the call by, in both passes.
        out: what the model gets, after the first pass and until `take_out`.
        waits: whether it is run again for its backward, as in `PlainCall`.
    """

    waits = True

    def __init__(
        self,
        recorder: LayerRecorder,
        number: int,
        layer: nn.Module,
        given: list[Any],
        spec: Any,
        found: tuple[Weights, Recording],
    ) -> None:
        self.layer, self.given, self.link, self.out = layer, given, object(), None
        self.recorder, self.weights, self.recording = recorder, *found
        self.random = recorder.lockstep.random_state()
        self.lists = collected.lists()
        self.second: Second | None = None
        self.number, self._spec, self.before = number, spec, self.random
        self._contexts = list(autocast_of(given))
        self._marks = {key: len(found) for key, found in self.lists.items()}
        self.results: list[Any] = []

    @property
    def reached(self) -> bool:
        """Whether a gradient has come to one of its outputs."""
        return any(leaf.grad is not None for leaf in self.results)

    def plain(self) -> PlainCall:
        """The call that takes over if its second pass cannot be recorded."""
        return PlainCall(
            self.layer, self.given, self._spec, self.results,
            random=self.before, contexts=self._contexts, marks=self._marks, link=self.link,
        )  # fmt: skip

    def find_second(self) -> bool:
        """Get the recording of the second pass, for the outputs that gradients have come to. Returns whether there is
        one.
        """
        reached = tuple(leaf.grad is not None for leaf in self.results)
        self.random, self.second = self.before, self.recording.seconds.get(reached)
        if self.second is not None:
            return True
        with ExitStack() as stack:
            stack.enter_context(self.recorder.lockstep.standing_for(self.link))  # a layer that is run here
            for context in self._contexts:
                stack.enter_context(context())
            self.second = self.recorder.second(self.layer, self.weights, self.recording, reached)
        return self.second is not None

    def begin(self, graphs: Sequence[Any]) -> None:
        """Play back the part up to the experts."""
        self.recording.kind.hold(self.weights)
        self.recording.take(self.given)
        self.play(graphs[0])

    def play(self, graph: Any) -> None:
        """Play back a part, with the call's own random numbers if it draws any."""
        if self.recording.draws is False:
            graph.replay()
            return
        lockstep = self.recorder.lockstep
        lockstep.set_random_state(self.random)
        graph.replay()
        self.random = lockstep.random_state()

    def leave(self) -> None:
        """Keep copies of the outputs, as the model gets them. Those that may get gradients are leaves."""
        outputs: Outputs = self.recording.first.outputs
        trained = trains(self.layer, self.given)

        def copy(each: Any) -> Any:
            if not isinstance(each, Tensor):
                return each
            copied = each.detach().clone()
            if copied.is_floating_point():
                self.results.append(copied.requires_grad_(trained))
            return copied

        flat = [copy(each) for each in outputs.flat]
        for key, found in outputs.lists.items():
            self.lists[key] += [copy(each) for each in found]
        self.out = _pytree.tree_unflatten(flat, outputs.spec)
        if self.recording.draws is None:
            pairs = zip(self.before, self.random, strict=True)
            self.recording.draws = not all(torch.equal(one, other) for one, other in pairs)

    def take_out(self) -> Any:
        """What the model gets. From now on nothing here refers to it but `results`."""
        out, self.out = self.out, None
        return out

    def take_grads(self) -> None:
        """Copy the gradients of the outputs to the recording's memory."""
        assert self.second is not None
        with torch.no_grad():
            for memory, at in zip(self.second.grads, self.second.ends, strict=True):
                grad = self.results[at].grad
                assert grad is not None
                memory.copy_(grad)

    def finish(self, from_experts: Sequence[Tensor | None]) -> list[Tensor]:
        """Go backward to the layer's inputs. The gradients are those of what the experts got. Returns the weights that
        got some.
        """
        second = self.second
        assert second is not None
        with torch.no_grad():
            for memory, grad in zip(second.from_asked, from_experts, strict=True):
                if grad is None:
                    memory.zero_()
                else:
                    memory.copy_(grad)
            self.recording.kind.hold(self.weights)
            self.play(second.graphs[-1])
            leaves = [each for each in self.given if isinstance(each, Tensor) and each.requires_grad]
            for leaf in _add_grads(leaves, second.to_given):
                tell_hooks(leaf)
            return _add_grads(self.weights.trained, second.to_weights)


class ReplayedLayer:
    """The calls of one layer by several micro-batches, whose experts run once on the tokens of all.

    All of it runs in one thread, since nothing in it is the model's own code but the experts.
    """

    def __init__(self, calls: Sequence[ReplayedCall]) -> None:
        self._calls, self._weights, self._lockstep = calls, calls[0].weights, calls[0].recorder.lockstep
        self._device = device_of(calls[0].recording.kind.tensors[0].device)

    @staticmethod
    def may_be(calls: Sequence[ReplayedCall | None]) -> bool:
        """Whether these are calls of one layer, and what they give to the experts can be joined."""
        first = calls[0]
        if first is None or not all(call is not None and call.weights is first.weights for call in calls):
            return False
        recordings = tuple(call.recording for call in calls if call is not None)
        known = first.recorder.joined
        if recordings not in known:
            known[recordings] = len(recordings) == 1 or _may_join([each.first.asked for each in recordings])
        return known[recordings]

    def first(self) -> None:
        """Run the first pass of all."""
        with self._lockstep.random_numbers(), torch.no_grad():
            with self._span():
                for call in self._calls:
                    call.begin(call.recording.first.graphs)
            parts = [call.recording.first.asked for call in self._calls]
            if parts[0].answer is not None:
                self._answer(parts, _rows(parts), _joined(parts))
                with self._span():
                    for call in self._calls:
                        call.play(call.recording.first.graphs[1])
            for call in self._calls:
                call.leave()

    def backward(self) -> None:
        """Run the second pass of all, for which `ReplayedCall.find_second` found recordings, and the way back."""
        with self._lockstep.random_numbers():
            seconds = [call.second for call in self._calls if call.second is not None]
            parts = [second.asked for second in seconds]
            with self._span():
                for call, second in zip(self._calls, seconds, strict=True):
                    call.begin(second.graphs)
            grads: list[list[Tensor | None]] = [[] for _ in parts]
            if parts[0].answer is None:
                for call in self._calls:
                    call.take_grads()
            else:
                grads = self._through_experts(parts, seconds)
            with self._span():
                trained = [call.finish(own) for call, own in zip(self._calls, grads, strict=True)]
        for weight in {id(each): each for own in trained for each in own}.values():
            tell_hooks(weight)

    def _span(self) -> spans.Span:
        """The time of what is played back for all calls."""
        return spans.device("attention", self._calls[0].number, self._device.current_stream())

    def _through_experts(self, parts: Sequence[Asked], seconds: Sequence[Second]) -> list[list[Tensor | None]]:
        """The experts' second pass, and their way back. Returns the gradients of what they got, for each call."""
        leaves, rows = _joined(parts), _rows(parts)
        out = self._answer(parts, rows, leaves)
        with self._span():
            for call, second in zip(self._calls, seconds, strict=True):
                call.play(second.graphs[1])
                call.take_grads()
                call.play(second.graphs[2])
        if out.requires_grad and any(second.to_answer is not None for second in seconds):
            pairs = zip(seconds, parts, strict=True)
            grads = [torch.zeros_like(part.answer) if s.to_answer is None else s.to_answer for s, part in pairs]  # type: ignore[arg-type]
            grad = grads[0] if len(grads) == 1 else torch.cat(grads)
            if not go_back(out, grad):
                torch.autograd.backward([out], [grad])
        asked = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
        split = [[None] * len(parts) if leaf.grad is None else leaf.grad.split(rows) for leaf in asked]
        return [list(own) for own in zip(*split, strict=True)] if split else [[] for _ in parts]

    def _answer(self, parts: Sequence[Asked], rows: list[int], leaves: list[Any]) -> Tensor:
        """Call the experts, and put their answer where the recordings read it."""
        answers = [part.answer for part in parts if part.answer is not None]
        assert self._weights.entry is not None and len(answers) == len(parts)
        args, kwargs = _pytree.tree_unflatten(leaves, parts[0].spec)
        self._lockstep.set_random_state(self._calls[0].before)
        with self._lockstep.standing_for(tuple(call.link for call in self._calls)):
            out: Tensor = self._weights.entry(*args, **kwargs)
        if out.shape != (sum(rows), *answers[0].shape[1:]) or out.dtype != answers[0].dtype:
            raise TypeError(f"routed experts gave {out.dtype} {list(out.shape)}, where their hidden states are "
                            f"{answers[0].dtype} {[sum(rows), *answers[0].shape[1:]]}")  # fmt: skip
        with torch.no_grad():
            torch._foreach_copy_(answers, list(out.split(rows)))
        return out


def _rows(parts: Sequence[Asked]) -> list[int]:
    """The number of tokens that each call has for the experts."""
    return [next(each for each in part.args if isinstance(each, Tensor)).shape[0] for part in parts]


def _may_join(parts: Sequence[Asked]) -> bool:
    """Whether all arguments are the same, or tensors with a row for each token."""
    if any(part.spec != parts[0].spec or (part.answer is None) != (parts[0].answer is None) for part in parts):
        return False
    for values in zip(*(part.args for part in parts), strict=True):
        if all(isinstance(each, Tensor) for each in values):
            kinds = {(each.dtype, each.shape[1:], each.requires_grad) for each in values}
            if len(kinds) > 1 or [len(each) if each.dim() else None for each in values] != _rows(parts):
                return False
        elif any(isinstance(each, Tensor) or each != values[0] for each in values):
            return False
    return True


def _joined(parts: Sequence[Asked]) -> list[Any]:
    """What the experts get for all calls, cut off from the recordings, ready to take gradients where these do."""
    if len(parts) == 1:
        return parts[0].leaves()
    every = []
    for values in zip(*(part.args for part in parts), strict=True):
        first = values[0]
        if isinstance(first, Tensor):
            first = torch.cat([each.detach() for each in values]).requires_grad_(first.requires_grad)
        every.append(first)
    return every


def _add_grads(tensors: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[Tensor]:
    """Add gradients to those that the tensors have. Returns the tensors that got some."""
    pairs = [(tensor, grad) for tensor, grad in zip(tensors, grads, strict=True) if grad is not None]
    more = [(tensor.grad, grad) for tensor, grad in pairs if tensor.grad is not None]
    if more:
        torch._foreach_add_(*map(list, zip(*more, strict=True)))
    if first := [(tensor, grad) for tensor, grad in pairs if tensor.grad is None]:
        copies = torch._foreach_mul([grad for _, grad in first], 1)  # copies, made by one kernel
        for (tensor, _), grad in zip(first, copies, strict=True):
            tensor.grad = grad
    return [tensor for tensor, _ in pairs]
