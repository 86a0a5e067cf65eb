"""Layers under gradient checkpointing that keep their activations where GPU memory is free, and are not run again.

Running a layer again takes as long as its forward without the experts, whose outputs are kept anyway. The last layers
keep their activations: they are the first to give memory back, to the layers before them that are run again. Layers
that are recorded (`ktft.model.recorder`) do not keep theirs: all of a kind have one memory, and with so few tokens the
host would take longer to launch their kernels one by one than the GPU takes to run the recorded ones twice.

What training needs without them is seen in the first steps, and what a layer keeps once one does. Both are taken to
grow with the tokens that go together.

Where memory is left when all layers do so, or where they are recorded, the last layers also keep the gate and up
products of their experts, which backward otherwise computes again.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ktft.device import Device
from ktft.model.memory import VRAM_FRAGMENTS, spare_bytes
from ktft.system import readable

logger = logging.getLogger("ktft")

SEEN = 3
"""The steps that show what training needs: in the second, layers are recorded, and after it experts stay on the GPU."""


class StoredActivations:
    """Which layers keep their activations.

    Args:
        device: that of the activations.
        layers: the number of decoder layers.
        memory: the most bytes that activations may take; `auto` is what training leaves, 0 is for none.

    Attributes:
        count: how many layers, from the last one, may keep theirs in the present group of micro-batches.
        gates: how many layers, from the last one, may keep gate and up in it.
    """

    def __init__(self, device: Device, layers: int, memory: int | str) -> None:
        self._device, self._layers, self._memory = device, layers, memory
        self.count = self.gates = self._gate_bytes = self._steps = self._tokens = self._before = 0
        self._stored: Counter[int] = Counter()  # number of a layer -> the group's tokens of which it has activations
        self._most = 0  # tokens of a group that was seen without stored activations
        self._work = 0  # bytes that such a group takes beside what is there after it
        self._waiting = math.inf  # bytes for each of its tokens that wait for backward when the loss is known
        self._each: float | None = None  # bytes that a layer keeps of a token,
        self._of = 0  # as seen where they were stored of so many tokens, of each layer
        self._whole = False  # whether it was seen of all layers
        self._recorded = 0  # most tokens of a group whose layers kept none, though one might: they are recorded
        self._told = self._told_gates = False

    @property
    def may_be(self) -> bool:
        """Whether a layer may ever keep its activations."""
        return self._memory != 0 and self._device.free_bytes() is not None

    @property
    def bytes(self) -> int:
        """Bytes that the group's layers have stored, or may store of gate and up, as far as it is known."""
        return int(self._stored.total() * (self._each or 0)) + self._gate_bytes

    def begin_step(self) -> None:
        """An optimizer step begins."""
        self._steps += 1

    def fitting(self, tokens: int) -> int:
        """How many layers can keep their activations of so many tokens, by the memory that is free now."""
        room = self._room(tokens)
        if self._each is None:  # one shows what a layer keeps
            return min(1, self._layers) if room > 0 else 0
        return max(0, min(self._layers, int(room / self._taken(self._each, tokens))))

    def fitting_gates(self, tokens: int, count: int, each: int) -> int:
        """How many layers can keep gate and up of so many tokens beside the activations of `count` layers.

        Args:
            each: bytes of a token's gate and up; 0 if they are not known yet.
        """
        recorded = self._each is None and tokens <= self._recorded
        if not tokens or not (recorded or (self._whole and count == self._layers)):
            return 0
        room = self._room(tokens) - count * self._taken(self._each or 0, tokens)
        if each == 0:  # one layer shows it
            return min(1, self._layers) if room > 0 else 0
        return max(0, min(self._layers, int(room / self._taken(each, tokens))))

    @staticmethod
    def _taken(each: float, tokens: int) -> float:
        """Bytes that a layer takes if it keeps `each` bytes of a token."""
        return each * tokens * (1 + VRAM_FRAGMENTS)

    def _room(self, tokens: int) -> int:
        """Bytes that are free for what so many tokens leave."""
        free = self._device.free_bytes()
        if free is None or self._memory == 0 or self._steps <= SEEN or not self._most:
            return 0
        needed = self._device.memory_allocated() + int(self._work * max(1.0, tokens / self._most))
        room = free[0] + self._device.memory_reserved() - needed - spare_bytes(needed)
        if isinstance(self._memory, int):
            room = min(room, self._memory)
        return room

    def begin(self, tokens: int, count: int, gates: int = 0, each: int = 0) -> None:
        """A group of micro-batches with so many tokens begins, in which so many layers may keep their activations, and
        so many gate and up, `each` bytes of a token.
        """
        self.count, self.gates, self._gate_bytes = count, gates, gates * each * tokens
        self._tokens, self._before = tokens, self._device.memory_allocated()
        self._stored.clear()

    def take(self, number: int, given: Sequence[Any]) -> bool:
        """Whether a layer that is called with these inputs is to keep its activations."""
        if number < self._layers - self.count:
            return False
        sizes = (each.shape[:-1].numel() for each in given if isinstance(each, Tensor) and each.requires_grad)
        self._stored[number] += max(sizes, default=0)
        return True

    def see_loss(self) -> None:
        """The group has its loss, and all that waits for backward is there."""
        if not self._tokens:
            return
        waiting, stored = self._device.memory_allocated() - self._before, self._stored.total()
        # Gate and up count as activations here, so of groups that have both only a first, too large guess is taken
        if self.gates and (not stored or self._each is not None):
            return
        if not stored:  # what is more than the least is taken once, such as a recording
            self._waiting = min(self._waiting, waiting / self._tokens)
            return
        each = (waiting - self._waiting * self._tokens) / stored
        if each > 0 and stored >= self._of:
            self._each = each if self._each is None or stored > self._of else max(self._each, each)
            self._of = stored
        self._whole |= len(self._stored) == self._layers and not self.gates

    def end(self) -> None:
        """The group is over."""
        if self._tokens and not self._stored and self._steps <= SEEN:
            self._most = max(self._most, self._tokens)
            self._work = max(self._work, self._device.memory_reserved() - self._device.memory_allocated())
        if self._steps > SEEN and self.count and not self._stored:
            self._recorded = max(self._recorded, self._tokens)
        if self.gates > 1 and not self._told_gates:
            self._told_gates = True
            logger.info(
                "%d of %d layers keep gate and up of their experts in %s of free GPU memory for backward",
                self.gates, self._layers, readable(self._gate_bytes),
            )  # fmt: skip
        if self._each is not None and len(self._stored) > 1 and not self._told:
            self._told = True
            logger.info(
                "%d of %d layers keep their activations in %s of free GPU memory, and are not run again in backward",
                len(self._stored), self._layers, readable(self.bytes - self._gate_bytes),
            )  # fmt: skip
        self.count = self.gates = self._gate_bytes = self._tokens = 0
        self._stored.clear()
