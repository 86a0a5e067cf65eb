"""Experts that stay on the GPU, packed as in host memory, chosen by how many tokens they get."""

from __future__ import annotations

import heapq
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ktft.device import device_of
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.gpu.rings import ALIGNMENT, Source, row_bytes
from ktft.native import ExpertLayer
from ktft.native.cuda import Rows
from ktft.system import readable

logger = logging.getLogger("ktft")

DECAY = 0.9
"""The weight that the running mean of shares gives to the steps before."""
SHARE = 0.03
"""What exchanging residents may add to the bytes that a step copies to the device, as a share of these."""
MARGIN = 1.25
"""An expert needs this many times a resident's tokens to take its place, so that two similar ones do not alternate."""


@dataclass
class _Layer:
    sources: list[Source]  # its packed experts in host memory, one for each slice
    slots: dict[int, int]  # the block of each resident expert
    share: torch.Tensor  # each expert's share of the layer's tokens, a running mean over steps
    counted: torch.Tensor  # each expert's tokens in this step


def free_for_residents(lane: GpuLane) -> int:
    """Bytes that residents may take on the lane's device, after a step has shown what training needs.

    A quarter of what torch has reserved, and at least 1 GiB, stays free for longer batches. It is 0 on the CPU.
    """
    room = device_of(lane.device).free_bytes()
    if room is None:
        return 0
    reserved = device_of(lane.device).memory_reserved()
    return max(0, room[0] - max(1 << 30, reserved // 4))


class Residents:
    """Experts of all layers that stay on a lane's device, in one arena of equal blocks.

    Args:
        lane: from now on it uses these blocks instead of streaming their experts.
        budget: the most bytes that the arena may have.
        layers: those whose experts may stay.

    Attributes:
        arena: uint8 `[blocks, bytes of one]` on the device.
        arrived: event after which every expert is in its block.
        moved: how many experts were copied to the arena so far.

    Raises:
        torch.OutOfMemoryError: the device has no room for the arena.
        ValueError: not even one expert fits the budget.
    """

    def __init__(self, lane: GpuLane, budget: int, layers: Sequence[ExpertLayer]) -> None:
        self._lane, self._transfer = lane, lane.transfer
        self._layers: weakref.WeakKeyDictionary[ExpertLayer, _Layer] = weakref.WeakKeyDictionary()
        for layer in layers:
            locked = self._transfer.locks.layer(layer)
            sources = [Source(s.address, (s.expert_bytes,), torch.uint8, locked) for s in layer.slices()]
            zeros = torch.zeros(layer.num_experts)
            self._layers[layer] = _Layer(sources, {}, zeros, zeros.clone())
        block = max((sum(source.bytes for source in part.sources) for part in self._layers.values()), default=0)
        self._block_bytes = -(-block // ALIGNMENT) * ALIGNMENT
        count = min(budget // max(1, self._block_bytes), sum(layer.num_experts for layer in layers))
        if count < 1:
            raise ValueError(
                f"gpu_expert_memory: {budget} bytes hold no expert, one takes {self._block_bytes}; give more, or 0"
            )
        with torch.inference_mode(False):
            self.arena = torch.empty(count, self._block_bytes, dtype=torch.uint8, device=lane.device)
        self._transfer.keep([self.arena], self._transfer.into)
        self._free = list(range(count - 1, -1, -1))
        self.arrived = self._transfer.event()
        self.arrived.record(self._transfer.compute())  # products may still use this memory, which torch has just reused
        self.arrived.wait(self._transfer.into)
        self._before, self.moved = self._transfer.copied_bytes, 0
        lane.hold(self)

    @property
    def bytes(self) -> int:
        return self.arena.nbytes

    def slots(self, layer: ExpertLayer) -> dict[int, int]:
        """The layer's resident experts, each with the number of its block."""
        part = self._layers.get(layer)
        return {} if part is None else part.slots

    def sources(self, layer: ExpertLayer) -> list[Source]:
        """The blocks as matrices to copy from: one for each slice of the layer's packed experts."""
        part = self._layers.get(layer)
        first = self._blocks(part, 0) if part is not None else []
        return [Source(m.batch, (m.bytes,), torch.uint8, stride=self._block_bytes) for m in first]

    def start(self, expert_tokens: Mapping[ExpertLayer, Sequence[float]]) -> None:
        """Fill the arena by the tokens of each expert that an earlier run counted, as in its training report."""
        for layer, tokens in expert_tokens.items():
            part = self._layers[layer]
            if len(tokens) != len(part.share):
                raise ValueError(
                    f"{layer.name} has {len(part.share)} experts, the earlier run's counts are of {len(tokens)}"
                )
            part.share = torch.tensor(tokens, dtype=torch.float32) / max(1, sum(tokens))
        self._replace(0, asked=True)

    def observe(self, layer: ExpertLayer, counts: Sequence[int]) -> None:
        """Count the tokens that each expert got in a micro-batch."""
        self._layers[layer].counted += torch.tensor(counts, dtype=torch.float32)

    def adapt(self, allowed: int | None = None) -> int:
        """Call this once a step: fill free blocks, and let experts with many tokens take the places of those with few.

        The copies, whose bytes are returned, run on the lane's own stream. `allowed` is the most bytes of experts that
        take others' places; by default it is a share of what the step copied.
        """
        for part in self._layers.values():
            if total := float(part.counted.sum()):
                now = part.counted / total
                part.share = DECAY * part.share + (1 - DECAY) * now if part.share.any() else now
                part.counted = torch.zeros_like(now)
        if allowed is None:
            allowed = int(SHARE * (self._transfer.copied_bytes - self._before))
        moved = self._replace(max(allowed // self._block_bytes, 1 if allowed else 0))
        self._before = self._transfer.copied_bytes
        return moved

    def _replace(self, swaps: int, asked: bool = False) -> int:
        """Fill free blocks, then exchange at most `swaps` residents; returns the bytes that are copied.

        `asked`: only experts for which some token asked take free blocks.
        """
        if not any(part.share.any() for part in self._layers.values()):
            return 0
        outside: list[tuple[float, int, ExpertLayer, int]] = []
        inside: list[tuple[float, int, ExpertLayer, int]] = []
        with self._lane.mutex:
            for number, (layer, part) in enumerate(self._layers.items()):
                for expert, share in enumerate(part.share.tolist()):
                    (inside if expert in part.slots else outside).append((share, number, layer, expert))
            # Equal shares go by the order of layers and experts. Those that no token asks for come last, but if there
            # is room for all of a layer, nobody needs to know whether one does
            comers = heapq.nsmallest(len(self._free) + swaps, outside, key=lambda each: (-each[0], each[1], each[3]))
            if asked:
                comers = [comer for comer in comers if comer[0] > 0]
            # In the order of experts, so that neighbours are copied together
            first = sorted(comers[: len(self._free)], key=lambda each: (each[1], each[3]))
            coming = [(layer, expert, self._free.pop()) for _, _, layer, expert in first]
            goers = heapq.nsmallest(swaps, inside, key=lambda each: (each[0], each[1], each[3]))
            for (share, _, layer, expert), (held, _, other, out) in zip(comers[len(coming) :], goers, strict=False):
                if share <= MARGIN * held:
                    break
                coming.append((layer, expert, self._layers[other].slots.pop(out)))
            return self._bring(coming)

    def _bring(self, coming: Sequence[tuple[ExpertLayer, int, int]]) -> int:
        """Copy experts to their blocks, as soon as the products no longer read these."""
        moved = 0
        self._lane.used.wait(self._transfer.into)
        for layer, expert, slot in coming:
            part = self._layers[layer]
            self._transfer.copy_in([expert], self._blocks(part, slot))
            moved += row_bytes(part.sources)
            part.slots[expert] = slot
        if coming:
            self.arrived.record(self._transfer.into)
        self.moved += len(coming)
        return moved

    def _blocks(self, part: _Layer, slot: int) -> list[Rows]:
        """The copies of an expert's slices from host memory to a block."""
        at, found = self.arena.data_ptr() + slot * self._block_bytes, []
        for source in part.sources:
            found.append(Rows(source.address, at, source.bytes))
            at += source.bytes
        return found


STEPS = 2
"""The steps of training that show what memory it needs: in the second, layers are recorded."""


class TrainingResidents:
    """The residents of a training run. They are made after its first `STEPS` steps.

    They may take `memory` bytes; 0 is for none, `auto` for what training leaves. Then they go before a step that needs
    more memory than those before, and smaller ones are made after it.
    """

    def __init__(self, lane: GpuLane, memory: int | str) -> None:
        self._lane, self._memory = lane, memory
        self._residents: Residents | None = None
        self._steps = 0
        self._most = (0, 0)  # tokens of a step so far: of one micro-batch, and in all
        self._counted: list[tuple[ExpertLayer, Sequence[int]]] = []

    def make_room(self, tokens: int, together: int) -> None:
        """Before a step with so many tokens in one micro-batch, and so many that go together: take no memory that it
        probably needs.
        """
        before, self._most = self._most, (max(tokens, self._most[0]), max(together, self._most[1]))
        if self._residents is None or self._memory != "auto" or 0 in before:
            return
        grows = max(now / then for now, then in zip(self._most, before, strict=True))
        room = free_for_residents(self._lane)
        used = device_of(self._lane.device).memory_reserved() - self._residents.bytes
        if (grows - 1) * used > room + used // 4:
            logger.info(
                "%s of GPU memory no longer hold resident experts, because the next step has %s tokens, and none "
                "before had more than %s", readable(self._residents.bytes), f"{max(tokens, together):,}",
                f"{max(before):,}",
            )  # fmt: skip
            self._lane.hold(None)
            self._residents = None

    def observe(self, layer: ExpertLayer, counts: Sequence[int]) -> None:
        """Count a trained micro-batch's rows by expert."""
        if self._memory != 0:
            self._counted.append((layer, counts))

    def end_step(self, layers: Sequence[ExpertLayer]) -> None:
        """Between two steps: make the residents, or let them follow what was counted."""
        if self._memory == 0:
            return
        self._steps += 1
        if self._steps < STEPS:
            return
        if self._residents is None:
            budget = free_for_residents(self._lane) if self._memory == "auto" else int(self._memory)
            if self._memory == "auto" and budget < max(layer.packed_bytes // layer.num_experts for layer in layers):
                if device_of(self._lane.device).free_bytes() is not None:
                    logger.info("gpu_expert_memory: auto found no room for experts that stay on the GPU")
                self._memory = 0
                self._counted.clear()
                return
            self._residents = Residents(self._lane, budget, layers)
            logger.info("%s of GPU memory hold resident experts", readable(self._residents.bytes))
        while self._counted:
            self._residents.observe(*self._counted.pop())
        self._residents.adapt()
