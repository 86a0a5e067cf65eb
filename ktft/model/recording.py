"""Decoder layers as recorded kernels: a GPU gets all that a layer does around its experts in a few launches.

With few tokens, the host takes longer to launch the kernels of a layer, one by one, than the GPU to run them. So what
repeats is recorded once, as CUDA graphs, and played back. A layer that is checkpointed has two passes. The first, up to
the experts and from there on, keeps nothing. The second does the same with all that backward needs, then goes from the
output back to the experts, and from there and the output back to the layer's input. Between these parts, the experts
run as always: what they do depends on the routing.

Parts of one pass share memory which no other tensor uses until the pass is over. Each micro-batch that goes through a
layer with others has recordings of its own, because what it keeps for backward lives as long as theirs.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ktft import spans
from ktft.device import Device, device_of
from ktft.model import collected
from ktft.model.layer_kind import SharedWeights, Unlike, Weights


class _Graphs:
    """Records a pass in parts; with `rehearse` nothing is recorded, and all runs.

    What is recorded must have run in the same thread before: libraries load kernels and choose among them on first use,
    which a recording does not allow.
    """

    def __init__(self, device: Device, pool: Any, rehearse: bool = False) -> None:
        self._device, self._pool, self.parts = device, pool, list[Any]()
        self._open, self._rehearse = False, rehearse

    def begin(self) -> None:
        """The next part begins."""
        if self._rehearse:
            return
        self.parts.append(self._device.new_graph(self._pool))
        self.parts[-1].begin()
        self._open = True

    def end(self) -> None:
        """The part is complete."""
        if self._rehearse:
            return
        self._open = False
        self.parts[-1].end()

    @contextlib.contextmanager
    def part(self) -> Iterator[None]:
        self.begin()
        yield
        self.end()

    def abandon(self) -> None:
        """End what an error left open."""
        if self._open:
            with contextlib.suppress(RuntimeError):
                self.end()


@dataclass
class Asked:
    """The call of a layer's experts within a recording.

    Attributes:
        args: what they get; its tensors are those of the recording.
        answer: memory for what they return; None until they were called.
    """

    args: list[Any] = field(default_factory=list)
    spec: Any = None
    answer: Tensor | None = None

    def leaves(self) -> list[Any]:
        """The arguments, cut off from the recording, ready to take gradients where it does."""
        return [
            each.detach().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each for each in self.args
        ]


@dataclass
class Outputs:
    """What a pass makes.

    Attributes:
        flat, spec: what the layer returns.
        lists: what the model collects beside it.
    """

    flat: list[Any]
    spec: Any
    lists: dict[Any, list[Any]]

    @property
    def every(self) -> list[Any]:
        return [*self.flat, *(each for found in self.lists.values() for each in found)]

    @property
    def floating(self) -> list[Tensor]:
        """Those that may get gradients."""
        return [each for each in self.every if isinstance(each, Tensor) and each.is_floating_point()]


@dataclass
class First:
    graphs: list[Any]
    asked: Asked
    outputs: Outputs


@dataclass
class Second:
    """The second pass, and the way back.

    Attributes:
        ends: the numbers, among the floating outputs, of those that get gradients.
        grads: memory for these.
        to_answer: the gradient of the experts' output; None if it has none.
        from_asked: memory for the gradients of what the experts got.
        to_given: the gradients of the inputs that take some, None where there is none.
        to_weights: likewise, of the weights that are trained.
    """

    graphs: list[Any]
    asked: Asked
    ends: list[int]
    grads: list[Tensor]
    to_answer: Tensor | None
    from_asked: list[Tensor]
    to_given: Sequence[Tensor | None]
    to_weights: Sequence[Tensor | None]


class Recording:
    """What one kind of layer does with inputs of one shape, for one of the micro-batches that go together.

    Args:
        weights: of the layer that is recorded.
        given, spec: the flat arguments of its call; tensors that take gradients are leaves.

    Attributes:
        draws: whether playing it back draws random numbers; None before it was tried.
        seconds: the second pass, by the outputs that gradients come to.
    """

    def __init__(self, kind: SharedWeights, weights: Weights, given: Sequence[Any], spec: Any, pool: Any) -> None:
        self.kind, self._spec, self._pool = kind, spec, pool
        self._device = device_of(kind.tensors[0].device)
        self.given = [_memory(each) if isinstance(each, Tensor) else each for each in given]
        self._held: list[tuple[Tensor, int] | None] = [None] * len(given)
        self._taken = [at for at, each in enumerate(given) if isinstance(each, Tensor)]
        self.seconds: dict[tuple[bool, ...], Second] = {}
        self.checked: set[Weights] = {weights}
        self.draws: bool | None = None
        kind.hold(weights)
        self.take(given)
        self._record_first(weights, rehearse=True)
        self.first = self._record_first(weights)

    def take(self, given: Sequence[Any]) -> None:
        """Copy a call's arguments to the recording's memory. What all layers share, such as a mask, is there already
        after the first of them.
        """
        with torch.no_grad():
            for at in self._taken:
                held, theirs = self._held[at], given[at]
                if held is None or held[0] is not theirs or held[1] != theirs._version:
                    self.given[at].copy_(theirs)
                    self._held[at] = None if theirs.requires_grad else (theirs, theirs._version)

    def second(self, weights: Weights, reached: tuple[bool, ...]) -> Second:
        """The second pass, if gradients come to these of the outputs."""
        if reached not in self.seconds:
            self.kind.hold(weights)
            self._record_second(weights, reached, rehearse=True)
            self.seconds[reached] = self._record_second(weights, reached)
        return self.seconds[reached]

    def run_plain(self, weights: Weights, layer: nn.Module, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What a layer gives to its experts, and its outputs, kernel by kernel, with the answer that is in memory."""
        asked = Asked(answer=self.first.asked.answer)
        args, kwargs = _pytree.tree_unflatten(list(given), self._spec)
        with torch.no_grad(), self._called(weights, asked), collected.into(_empty_lists()) as lists:
            flat = _pytree.tree_leaves(nn.Module.__call__(layer, *args, **kwargs))
        return asked.args, Outputs(flat, None, lists).every

    def _record_first(self, weights: Weights, rehearse: bool = False) -> First:
        asked, graphs = Asked(), _Graphs(self._device, self._pool, rehearse)
        with torch.no_grad():
            outputs = self._record(weights, asked, graphs)
        return First(graphs.parts, asked, outputs)

    def _record_second(self, weights: Weights, reached: tuple[bool, ...], rehearse: bool = False) -> Second:
        asked, graphs = Asked(answer=self.first.asked.answer), _Graphs(self._device, self._pool, rehearse)
        given = [each for each in self.given if isinstance(each, Tensor) and each.requires_grad]
        with torch.enable_grad():
            outputs = self._record(weights, asked, graphs).floating
        if len(outputs) != len(reached):
            raise Unlike("its second pass has other outputs than its first")
        places = [at for at, here in enumerate(reached) if here and outputs[at].requires_grad]
        ends, trained = [outputs[at] for at in places], self.kind.trained
        grads = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in ends]
        to_answer, middle = None, [each for each in asked.args if isinstance(each, Tensor) and each.requires_grad]
        from_asked = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in middle]
        # Casts belong to the forward: in force here, they would round gradients that stay in fp32 otherwise
        with _quiet(graphs), torch.autocast(self._device.device.type, enabled=False):
            if asked.answer is not None:
                with graphs.part():
                    (to_answer,) = torch.autograd.grad(
                        ends, [asked.answer], grads, retain_graph=True, allow_unused=True
                    )
            with graphs.part():
                found = torch.autograd.grad(
                    [*ends, *middle], [*given, *trained], [*grads, *from_asked], allow_unused=True
                )
        to_given, to_weights = list(found[: len(given)]), list(found[len(given) :])
        return Second(graphs.parts, asked, places, grads, to_answer, from_asked, to_given, to_weights)

    def _record(self, weights: Weights, asked: Asked, graphs: _Graphs) -> Outputs:
        """Record the layer's own code, up to the experts and from there on."""
        args, kwargs = _pytree.tree_unflatten(self.given, self._spec)
        before = torch.get_rng_state()
        kind = self._device.device.type
        with (
            _quiet(graphs),
            _uncached(kind),
            weights.replaced(self.kind.tensors),
            self._called(weights, asked, graphs),
            collected.into(_empty_lists()) as lists,
        ):
            graphs.begin()
            flat, spec = _pytree.tree_flatten(nn.Module.__call__(weights.layer, *args, **kwargs))
            graphs.end()
        if kind != "cpu" and not torch.equal(before, torch.get_rng_state()):
            raise Unlike("it draws random numbers on the CPU")
        return Outputs(flat, spec, lists)

    @contextlib.contextmanager
    def _called(self, weights: Weights, asked: Asked, graphs: _Graphs | None = None) -> Iterator[None]:
        """A block in which a call of the experts is noted in `asked`, and returns the answer that is in memory."""
        if (entry := weights.entry) is None:
            yield
            return

        def called(*args: Any, **kwargs: Any) -> Tensor:
            if asked.args:
                raise Unlike("it calls its experts more than once")
            if graphs is not None:
                graphs.end()
            asked.args, asked.spec = _pytree.tree_flatten((args, kwargs))
            if asked.answer is None:
                like = asked.args[0]
                asked.answer = torch.zeros(like.shape, dtype=like.dtype, device=like.device).requires_grad_()
            if graphs is not None:
                graphs.begin()
            return asked.answer

        # Its hooks run whenever it is called in earnest
        own = {"forward": called, "_forward_pre_hooks": OrderedDict(), "_forward_hooks": OrderedDict()}
        before = {name: entry.__dict__[name] for name in own if name in entry.__dict__}
        entry.__dict__ |= own
        try:
            yield
        finally:
            for name in own:
                del entry.__dict__[name]
            entry.__dict__ |= before


def _memory(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone(memory_format=torch.preserve_format)
    return copy.requires_grad_(tensor.requires_grad)


def _empty_lists() -> dict[Any, list[Any]]:
    return {key: [] for key in collected.lists()}


@contextlib.contextmanager
def _uncached(kind: str) -> Iterator[None]:
    """A block in which autocast keeps no copies of weights: the next block's kernels would not make them."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    with torch.autocast(kind, dtype, enabled, cache_enabled=False):
        yield


@contextlib.contextmanager
def _quiet(graphs: _Graphs) -> Iterator[None]:
    """A block in which no span is measured, because its events would be recorded; and no part is left open."""
    before, spans.RECORDER.on = spans.RECORDER.on, False
    try:
        yield
    except BaseException:
        graphs.abandon()
        raise
    finally:
        spans.RECORDER.on = before
