"""Several micro-batches go through a model's decoder layers together, so that an expert is needed once for all.

The usual order takes a micro-batch through the whole model, forward and backward, before the next. Here all of them go
through a layer before the next layer. Each runs the stock code with its own tokens, in lockstep: it waits where it
calls the routed experts, and these run once, on the tokens of all. The graph of autograd is cut at each decoder layer.
So the loss of each micro-batch is computed and goes backward by itself, down to the last layer's output; then the
layers go backward, last first. A layer that is checkpointed is run again then, unless there was memory to keep its
activations. Within a layer, each micro-batch goes backward to the experts, these go backward once for all, and each
micro-batch goes on to the layer's input: only one at a time needs memory for gradients of attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from transformers.modeling_layers import GradientCheckpointingLayer

from ktft.device import device_of
from ktft.lanes.kept import KeptOutputs
from ktft.model import collected
from ktft.model.away import Away, Place
from ktft.model.experts import decoder_lists, find_experts, first_experts
from ktft.model.layer_call import PlainCall, is_checkpointed, send_back
from ktft.model.lockstep import Lockstep, RandomState, current
from ktft.model.recorder import LayerRecorder
from ktft.model.replayed import ReplayedCall, ReplayedLayer
from ktft.model.stored import StoredActivations

Result = TypeVar("Result")

_CACHES = ("past_key_values", "past_key_value", "layer_past")


def obstacle(model: nn.Module) -> str | None:
    """Why a model's micro-batches cannot go through its layers together; None if they can."""
    if not collected.KNOWN:
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
        layers: the decoder layers, each with its number.
        slot: its number among those that go together.
        away: takes what waits for backward, if GPU memory is short.
        stored: says which layers keep their activations, if it is free.
        kept: what the experts of each layer keep for backward.
        leaves: id of a tensor that the model gave to layers -> that tensor, what the layers got in its place, and the
            number of the first call that got it.
    """

    layers: dict[nn.Module, int]
    recorder: LayerRecorder
    slot: int
    away: Away
    stored: StoredActivations
    kept: dict[nn.Module, list[KeptOutputs]]
    calls: list[PlainCall | ReplayedCall] = field(default_factory=list)
    leaves: dict[int, tuple[Tensor, Tensor, int]] = field(default_factory=dict)

    def call(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer on its inputs, cut off from what made them. Returns its outputs, cut off from the layer."""
        if self.away.on and self.calls:
            self._send_away()
        kwargs |= {name: None for name in _CACHES if kwargs.get(name) is not None}
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        flat, spec = _pytree.tree_flatten((args, kwargs))
        given = [self._leaf(each) if isinstance(each, Tensor) and each.requires_grad else each for each in flat]
        member = current()
        assert member is not None
        found = self.recorder.recording(layer, given, spec, self.slot) if is_checkpointed(layer) else None
        call = None
        if found is not None:
            call = ReplayedCall(self.recorder, self.layers[layer], layer, given, spec, found)
        if self.recorder.on and member.meet(("layer", len(self.calls)), call, _play):
            assert call is not None
            if call.recording.draws:
                self.recorder.lockstep.set_random_state(call.random)
            self.calls.append(call)
            return call.take_out()
        stored = is_checkpointed(layer) and self.stored.take(self.layers[layer], given)
        plain = PlainCall(layer, given, spec, stored=stored)
        out = plain.first()
        self.calls.append(plain)
        return out

    @property
    def waiting(self) -> int:
        """Bytes of the inputs and outputs of layers that wait for backward on the device."""
        found = (each for call in self.calls for each in (*call.given, *call.results))
        tensors = {each.data_ptr(): each.nbytes for each in found if isinstance(each, Tensor) and each.requires_grad}
        return sum(tensors.values())

    def _send_away(self) -> None:
        """The last call needs nothing more of what waits for its backward, and the model has gone on."""
        number = len(self.calls) - 1
        self.away.release(number - 1)
        if not self.calls[-1].waits:
            return
        for places in self._places_of_inputs():
            self.away.send(number, places)
        for kept in self.kept.get(self.calls[-1].layer, ()):
            self.away.send_kept(number, kept)

    def _places_of_inputs(self) -> list[list[Place]]:
        """Where the last call's inputs with gradients are: among what it got, and what the call before gave."""
        found: dict[int, list[Place]] = {}
        for at, each in enumerate(self.calls[-1].given):
            if isinstance(each, Tensor) and each.requires_grad:
                found.setdefault(id(each), []).append((self.calls[-1].given, at))
        before = self.calls[-2].results if len(self.calls) > 1 else []
        for at, each in enumerate(before):
            if id(each) in found:
                found[id(each)].append((before, at))
        return list(found.values())

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
            send_back(ready, retain_graph=True)


class LayerOrder:
    """Runs micro-batches of a model together, which must have no `obstacle`.

    Args:
        record: whether to record what layers do, on a device that can.
        activation_memory: the setting `gpu_activation_memory`.

    Attributes:
        away: takes what waits for backward, once it is switched on.
        stored: says which checkpointed layers keep their activations.
        waiting: bytes that waited for backward on the device when the last group failed.
    """

    def __init__(
        self, model: nn.Module, lockstep: Lockstep, record: bool = True, activation_memory: int | str = "auto"
    ) -> None:
        layers = list(decoder_layers(model).values())
        self._layers = {layer: number for number, layer in enumerate(layers)}
        self._sparse = frozenset(layer for layer in layers if first_experts(layer) is not None)
        self._experts = list(find_experts(model).values())
        found = {layer: [each.laned for each in find_experts(layer).values()] for layer in layers}
        self._laned = {layer: [each for each in laned if each is not None] for layer, laned in found.items()}
        self._kept = {layer: [each.kept for each in laned] for layer, laned in self._laned.items()}
        self.lockstep, self.recorder = lockstep, LayerRecorder(layers, lockstep, record)
        device = device_of(next(layers[0].parameters()).device)
        self.away, self.waiting = Away(device), 0
        self.stored = StoredActivations(device, len(layers), activation_memory)

    @property
    def pays_alone(self) -> bool:
        """Whether it pays to run even one micro-batch in this order: its layers may be recorded or not run again."""
        able = self.recorder.on or self.stored.may_be
        return able and any(getattr(layer, "gradient_checkpointing", False) for layer in self._layers)

    def run(
        self, works: Sequence[Callable[[], Result]], states: Sequence[RandomState], tokens: int = 0, stored: int = 0
    ) -> list[Result]:
        """Run the training steps of micro-batches, forward and backward. Returns what they return.

        Args:
            works: the steps.
            states: the random numbers that each begins with.
            tokens: how many they have, padding included; 0 if it is not known.
            stored: how many layers keep their activations, of those that `stored.fitting` allows.

        Raises:
            BaseException: what the first of them raised.
        """
        self.recorder.begin()
        self.away.begin()
        self._begin_storing(tokens, stored)
        for layer in self._layers:
            _run_without_checkpoint(layer)
        given = self.away, self.stored, self._kept
        batches = [_MicroBatch(self._layers, self.recorder, slot, *given) for slot in range(len(works))]
        going = [partial(_in, batch, work) for batch, work in zip(batches, works, strict=True)]
        try:
            results = self.lockstep.run(going, states)
            self.stored.see_loss()
            self._go_back(batches)
        except BaseException:
            kept = {id(each): each.bytes for found in self._kept.values() for each in found}
            self.waiting = sum(batch.waiting for batch in batches) + sum(kept.values())
            raise
        finally:
            self.away.end()
        self.stored.end()
        for lanes in {module.laned.lanes for module in self._experts if module.laned is not None}:
            if lanes.running is not None:
                lanes.running.deliver()
        return results

    def _begin_storing(self, tokens: int, stored: int) -> None:
        """Begin a group of which so many layers keep their activations, and as many as then fit gate and up."""
        each = max((laned.gate_bytes for found in self._laned.values() for laned in found), default=0)
        gates = 0 if self.away.on else self.stored.fitting_gates(tokens, stored, each)
        self.stored.begin(tokens, stored, gates, each)
        for layer, number in self._layers.items():
            for laned in self._laned[layer]:
                laned.keeps_gates = number >= len(self._layers) - gates

    def _go_back(self, batches: Sequence[_MicroBatch]) -> None:
        last = max(len(batch.calls) for batch in batches)
        for number in reversed(range(last)):
            self.away.back(number)
            self.away.fetch(number - 1)  # while this layer is computed
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

    def _backward(self, calls: Sequence[PlainCall | ReplayedCall]) -> None:
        calls = [call for call in calls if call.reached]
        replayed = [call for call in calls if isinstance(call, ReplayedCall)]
        together = bool(replayed) and len(replayed) == len(calls) and ReplayedLayer.may_be(replayed)
        if together and all(call.find_second() for call in replayed):
            ReplayedLayer(replayed).backward()
            return
        plain = [call.plain() if isinstance(call, ReplayedCall) else call for call in calls]
        if again := [call for call in plain if call.waits]:
            self.lockstep.run([call.again for call in again], [call.random for call in again])
        for number in reversed(range(max((call.experts for call in plain), default=0))):
            if ends := [end for call in plain for end in call.to_experts(number)]:
                send_back(ends)
        for call in plain:
            call.finish()


def _play(calls: Sequence[ReplayedCall | None]) -> list[bool]:
    """Run the first pass of a layer's calls if all can be replayed. Returns, for each of them, whether they were.

    Otherwise each runs kernel by kernel, so that the experts still run once for all.
    """
    together = ReplayedLayer.may_be(calls)
    if together:
        ReplayedLayer([call for call in calls if call is not None]).first()
    return [together] * len(calls)


def _run_without_checkpoint(layer: nn.Module) -> None:
    """Make a layer that is run here leave checkpointing to its call: newer versions of transformers checkpoint a
    layer's `forward`, within what `call_layer` takes the place of.
    """
    checkpoint = layer.__dict__.get("_gradient_checkpointing_func")
    if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpoint:
        layer.__dict__["_gradient_checkpointing_func"] = partial(_checkpoint, checkpoint)


def _checkpoint(original: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """torch's checkpoint of a function, unless the call of a layer runs it."""
    return original(function, *args, **kwargs) if current() is None else function(*args, **kwargs)


def _in(batch: _MicroBatch, work: Callable[[], Result]) -> Result:
    member = current()
    assert member is not None
    member.data = batch
    return work()
