"""Layers under gradient checkpointing that keep their activations where GPU memory is free, and are not run again.

Running a layer again takes as long as its forward without the experts, whose outputs are kept anyway. The last layers
keep their activations: they are the first to give memory back, to the layers before them that are run again.

What training needs without them is seen in the first steps, and what a layer keeps once one does. Both are taken to
grow with the tokens that go together.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ktft.device import Device
from ktft.model.memory import VRAM_FRAGMENTS, spare_bytes
from ktft.system import readable

logger = logging.getLogger("ktft")

SMALLEST = 16 << 20
"""A layer whose input has more bytes keeps its activations rather than being recorded. Below, the host takes longer to
launch its kernels one by one than the GPU to run the recorded ones twice.
"""

SEEN = 3
"""The steps that show what training needs: in the second, layers are recorded, and after it experts stay on the GPU."""


def input_bytes(given: Sequence[Any]) -> int:
    """Bytes of the largest of a layer's inputs that takes gradients."""
    return max((each.nbytes for each in given if isinstance(each, Tensor) and each.requires_grad), default=0)


class StoredActivations:
    """Which layers keep their activations.

    Args:
        device: that of the activations.
        layers: the number of decoder layers.
        memory: the most bytes that activations may take; `auto` is what training leaves, 0 is for none.

    Attributes:
        count: how many layers, from the last one, keep theirs in the present group of micro-batches.
    """

    def __init__(self, device: Device, layers: int, memory: int | str) -> None:
        self._device, self._layers, self._memory = device, layers, memory
        self.count = self._steps = self._tokens = 0
        self._most = 0  # tokens of a group that was seen without stored activations
        self._work = 0  # bytes that such a group takes beside what is there after it
        self._waiting = math.inf  # bytes for each of its tokens that wait for backward when the loss is known
        self._each: float | None = None  # bytes that a layer keeps of a token,
        self._of = 0  # as seen in a group of which so many layers did
        self._before = 0
        self._told = False

    @property
    def bytes(self) -> int:
        """Bytes that the present group's layers keep, as far as it is known."""
        return int(self.count * self._tokens * (self._each or 0))

    def takes(self, number: int) -> bool:
        """Whether this layer keeps its activations."""
        return number >= self._layers - self.count

    def begin_step(self) -> None:
        """An optimizer step begins."""
        self._steps += 1

    def fitting(self, tokens: int) -> int:
        """How many layers can keep their activations of so many tokens, by the memory that is free now."""
        free = self._device.free_bytes()
        if self._memory == 0 or free is None or self._steps <= SEEN or not self._most:
            return 0
        here = self._device.memory_allocated()
        needed = here + int(self._work * max(1.0, tokens / self._most))
        room = free[0] + self._device.memory_reserved() - needed - spare_bytes(needed)
        if isinstance(self._memory, int):
            room = min(room, self._memory)
        if self._each is None:
            return min(1, self._layers) if room > 0 else 0
        each = self._each * tokens * (1 + VRAM_FRAGMENTS)
        return max(0, min(self._layers, int(room / each)))

    def begin(self, tokens: int, count: int) -> None:
        """A group of micro-batches with so many tokens begins, in which so many layers keep their activations."""
        self.count, self._tokens, self._before = count, tokens, self._device.memory_allocated()
        if self._each is not None and count and not self._told:
            self._told = True
            logger.info(
                "%d of %d layers keep their activations in %s of free GPU memory, and are not run again for their "
                "backward", count, self._layers, readable(self.bytes),
            )  # fmt: skip

    def see_loss(self) -> None:
        """The group has its loss, and all that waits for backward is there."""
        if not self._tokens:
            return
        waiting = (self._device.memory_allocated() - self._before) / self._tokens
        if not self.count:  # more than the least is taken once, such as a recording
            self._waiting = min(self._waiting, waiting)
        elif waiting > self._waiting and self.count >= self._of:
            each = (waiting - self._waiting) / self.count
            self._each = each if self._each is None or self.count > self._of else max(self._each, each)
            self._of = self.count

    def end(self) -> None:
        """The group is over."""
        if self._tokens and not self.count and self._steps <= SEEN:
            self._most = max(self._most, self._tokens)
            self._work = max(self._work, self._device.memory_reserved() - self._device.memory_allocated())
        self.count = self._tokens = 0
