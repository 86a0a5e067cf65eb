"""Which layers of a model are recorded, and when."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ktft.device import device_of
from ktft.model import collected
from ktft.model.layer_kind import SharedWeights, Unlike, Weights
from ktft.model.lockstep import Lockstep
from ktft.model.memory import LARGEST_RECORDED, spare_bytes
from ktft.model.recording import Recording, Second

logger = logging.getLogger("ktft")

USES = 2
"""The use of a layer with inputs of one shape that is recorded; the ones before compile kernels and fill caches."""
MOST = 32
"""The most recordings of one kind of layer: one for each shape of input and each micro-batch that goes with others."""
_ROUNDING = 2.0**-5
"""By how much a layer's output may differ from that of a recording of its kind, relative to its norm."""


class LayerRecorder:
    """The recordings of one model's decoder layers.

    Args:
        layers: the model's.
        lockstep: runs the micro-batches that go together.
        record: whether to record, on a device that can.

    Attributes:
        joined: whether calls by these recordings can be joined, as far as `ReplayedLayer.may_be` was asked.
    """

    def __init__(self, layers: Sequence[nn.Module], lockstep: Lockstep, record: bool = True) -> None:
        self.lockstep, self._device = lockstep, device_of(next(layers[0].parameters()).device)
        self.on = record and self._device.records_graphs
        self._known: dict[nn.Module, tuple[tuple[object, ...], Weights, int]] = {}
        self._current: set[nn.Module] = set()  # the layers that are known not to have changed since `begin`
        self._numbers: dict[tuple[object, ...], int] = {}  # of kinds, by signature
        self._kinds: dict[int, SharedWeights] = {}
        self._recordings: dict[tuple[int, int, int], Recording] = {}
        self._uses: Counter[tuple[tuple[int, int, int], nn.Module]] = Counter()
        self._pools: dict[int, Any] = {}
        self._keys: dict[tuple[object, ...], tuple[int, int, int]] = {}
        self._refused: set[object] = set()
        self.joined: dict[tuple[Recording, ...], bool] = {}

    @property
    def bytes(self) -> int:
        """Bytes of the weights and inputs that recordings read, beside what belongs to graphs."""
        found = [each for kind in self._kinds.values() for each in kind.tensors]
        found += [each for made in self._recordings.values() for each in made.given if isinstance(each, Tensor)]
        return sum({each.data_ptr(): each.nbytes for each in found}.values())

    def begin(self) -> None:
        """Micro-batches begin to go through the layers; the optimizer may have changed weights before."""
        for kind in self._kinds.values():
            kind.forget()
        self._current.clear()

    def recording(
        self, layer: nn.Module, given: Sequence[Any], spec: Any, slot: int
    ) -> tuple[Weights, Recording] | None:
        """The recording for a call of a layer, made if it is time; None if the call must run kernel by kernel.

        `slot` is the number of the micro-batch among those that go together.
        """
        if (
            not self.on
            or layer in self._refused
            or (inputs := _shapes(given)) is None
            or _most_bytes(given) > LARGEST_RECORDED
        ):
            return None
        try:
            weights, kind = self._kind(layer)
        except Unlike as why:
            self._refuse(layer, layer, why)
            return None
        whole = (kind, slot, inputs, spec, _autocast(self._device.device.type), tuple(collected.lists()))
        key = self._keys.setdefault(whole, (kind, slot, len(self._keys)))
        if key in self._refused:
            return None
        self._uses[key, layer] += 1
        if key not in self._recordings:
            alike = sum(other[0] == kind for other in self._recordings)
            if self._uses[key, layer] < USES or alike >= MOST or not self._has_room():
                return None
            found = self._made(layer, weights, key, lambda: self._record(weights, kind, given, spec, slot))
            if found is None:
                return None
            self._recordings[key] = found
        found = self._recordings[key]
        if weights not in found.checked and not self._agrees(layer, weights, found, given):
            self._refuse(layer, layer, Unlike("another layer of its kind does something else"))
            return None
        return weights, found

    def _has_room(self) -> bool:
        """Whether the device has more memory left than training's own fluctuations take."""
        free = self._device.free_bytes()
        return free is None or free[0] >= spare_bytes(self._device.memory_reserved())

    def second(self, layer: nn.Module, weights: Weights, found: Recording, reached: tuple[bool, ...]) -> Second | None:
        """The second pass of a recording; None if it cannot be recorded."""
        return self._made(layer, weights, (id(found), reached), lambda: found.second(weights, reached))

    def _kind(self, layer: nn.Module) -> tuple[Weights, int]:
        """A layer's weights, and the number of its kind."""
        known = self._known.get(layer)
        if known is not None and layer in self._current:
            return known[1], known[2]
        if known is None or known[1].state() != known[0]:
            weights = Weights(layer, self._device.device)
            number = self._numbers.setdefault(weights.signature(), len(self._numbers))
            self._known[layer] = known = weights.state(), weights, number
        self._current.add(layer)
        return known[1], known[2]

    def _record(self, weights: Weights, kind: int, given: Sequence[Any], spec: Any, slot: int) -> Recording:
        if kind not in self._kinds:
            self._kinds[kind] = SharedWeights(weights)
        pool = self._pools.setdefault(slot, self._device.graph_pool())
        return Recording(self._kinds[kind], weights, given, spec, pool)

    def _made(self, layer: nn.Module, weights: Weights, key: object, make: Callable[[], Any]) -> Any:
        """What `make` records; None if it cannot be recorded, now or before."""
        if key in self._refused:
            return None
        with self.lockstep.random_numbers():
            try:
                return make()
            except (RuntimeError, Unlike) as error:
                self._refuse(key, layer, error)
                return None

    def _refuse(self, what: object, layer: nn.Module, why: Exception) -> None:
        """Do not try this again: a layer, or one recording of it."""
        if type(layer) not in self._refused:
            logger.info("a %s runs kernel by kernel: %s", type(layer).__name__, str(why).partition("\n")[0])
        self._refused |= {what, type(layer)}

    def _agrees(self, layer: nn.Module, weights: Weights, found: Recording, given: Sequence[Any]) -> bool:
        """Whether a recording of one layer says what another layer of its kind does. Both get the same answer of the
        experts, whatever is in its memory.
        """
        state = self.lockstep.random_state()
        found.kind.hold(weights)
        found.take(given)
        with self.lockstep.random_numbers(state):
            for graph in found.first.graphs:
                graph.replay()
        with self.lockstep.random_numbers(state):
            asked, outputs = found.run_plain(weights, layer, given)
        pairs = [*zip(found.first.asked.args, asked, strict=True)]
        pairs += zip(found.first.outputs.every, outputs, strict=True)
        agrees = all(_alike(one, other) for one, other in pairs if isinstance(one, Tensor))
        if agrees:
            found.checked.add(weights)
        return agrees


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.detach().double(), other.detach().double()
    return bool((one - other).norm() <= _ROUNDING * other.norm())


def _shapes(given: Sequence[Any]) -> tuple[object, ...] | None:
    """What a recording depends on; None if it may depend on more."""
    found: list[object] = []
    for each in given:
        if isinstance(each, Tensor):
            found.append((each.shape, each.stride(), each.dtype, each.device, each.requires_grad))
        elif isinstance(each, bool | int | float | str | torch.dtype | type(None)):
            found.append((type(each), each))
        else:
            return None
    return tuple(found)


def _most_bytes(given: Sequence[Any]) -> int:
    """Bytes of the largest input that takes gradients."""
    return max((each.nbytes for each in given if isinstance(each, Tensor) and each.requires_grad), default=0)


def _autocast(kind: str) -> tuple[object, ...]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
