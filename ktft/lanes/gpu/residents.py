"""Experts that stay on the GPU, packed as in host memory, chosen by how many tokens they get."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    rows: slice  # its experts among those of all layers


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
        self._experts: list[tuple[weakref.ref[ExpertLayer], int]] = []  # of all layers, in their order
        for layer in layers:
            locked = self._transfer.locks.layer(layer)
            sources = [Source(s.address, (s.expert_bytes,), torch.uint8, locked) for s in layer.slices()]
            rows = slice(len(self._experts), len(self._experts) + layer.num_experts)
            self._layers[layer] = _Layer(sources, {}, rows)
            self._experts += [(weakref.ref(layer), expert) for expert in range(layer.num_experts)]
        # By expert of all layers: its share of its layer's tokens, a running mean over steps; its tokens in this step;
        # and whether it is resident
        self._share, self._counted = (np.zeros(len(self._experts), np.float32) for _ in range(2))
        self._is_resident = np.zeros(len(self._experts), bool)
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

    def blocks(self, layer: ExpertLayer) -> list[Tensor]:
        """The bytes that each slice of the layer's packed experts has in all blocks, uint8 `[blocks, expert_bytes]`."""
        part, at, found = self._layers.get(layer), 0, []
        for source in part.sources if part is not None else ():
            found.append(self.arena[:, at : at + source.bytes])
            at += source.bytes
        return found

    def start(self, expert_tokens: Mapping[ExpertLayer, Sequence[float]]) -> None:
        """Fill the arena by the tokens of each expert that an earlier run counted, as in its training report."""
        for layer, tokens in expert_tokens.items():
            rows = self._layers[layer].rows
            if len(tokens) != layer.num_experts:
                raise ValueError(
                    f"{layer.name} has {layer.num_experts} experts, the earlier run's counts are of {len(tokens)}"
                )
            self._share[rows] = np.asarray(tokens, np.float32) / max(1, sum(tokens))
        self._replace(0, asked=True)

    def observe(self, layer: ExpertLayer, counts: Sequence[int]) -> None:
        """Count the tokens that each expert got in a micro-batch."""
        self._counted[self._layers[layer].rows] += np.asarray(counts, np.float32)

    def adapt(self, allowed: int | None = None) -> int:
        """Call this once a step: fill free blocks, and let experts with many tokens take the places of those with few.

        The copies, whose bytes are returned, run on the lane's own stream. `allowed` is the most bytes of experts that
        take others' places; by default it is a share of what the step copied.
        """
        for part in self._layers.values():
            counted, share = self._counted[part.rows], self._share[part.rows]
            if total := float(counted.sum()):
                share[:] = DECAY * share + (1 - DECAY) * counted / total if share.any() else counted / total
                counted[:] = 0
        if allowed is None:
            allowed = int(SHARE * (self._transfer.copied_bytes - self._before))
        moved = self._replace(max(allowed // self._block_bytes, 1 if allowed else 0))
        self._before = self._transfer.copied_bytes
        return moved

    def _replace(self, swaps: int, asked: bool = False) -> int:
        """Fill free blocks, then exchange at most `swaps` residents; returns the bytes that are copied.

        `asked`: only experts for which some token asked take free blocks.
        """
        if not self._share.any() or self._is_resident.all():
            return 0
        with self._lane.mutex:
            # Equal shares go by the order of layers and experts. Those that no token asks for come last, but if there
            # is room for all of a layer, nobody needs to know whether one does
            comers = self._sorted(~self._is_resident, -self._share)[: len(self._free) + swaps]
            if asked:
                comers = [comer for comer in comers if self._share[comer] > 0]
            # In the order of experts, so that neighbours are copied together
            coming = [(comer, self._free.pop()) for comer in sorted(comers[: len(self._free)])]
            goers = self._sorted(self._is_resident, self._share)[:swaps]
            for comer, goer in zip(comers[len(coming) :], goers, strict=False):
                if self._share[comer] <= MARGIN * self._share[goer]:
                    break
                layer, expert = self._expert(goer)
                self._is_resident[goer] = False
                coming.append((comer, self._layers[layer].slots.pop(expert)))
            return self._bring(coming)

    @staticmethod
    def _sorted(chosen: np.ndarray, by: np.ndarray) -> list[int]:
        """The numbers of the chosen experts of all layers, in the order of what they have in `by`."""
        numbers = np.flatnonzero(chosen)
        found: list[int] = numbers[np.argsort(by[numbers], kind="stable")].tolist()
        return found

    def _expert(self, number: int) -> tuple[ExpertLayer, int]:
        """The layer and the number in it, of an expert of all layers."""
        layer, expert = self._experts[number]
        found = layer()
        assert found is not None  # whoever asks has the layer
        return found, expert

    def _bring(self, coming: Sequence[tuple[int, int]]) -> int:
        """Copy experts to their blocks, as soon as the products no longer read these."""
        moved = 0
        self._lane.used.wait(self._transfer.into)
        for number, slot in coming:
            layer, expert = self._expert(number)
            part = self._layers[layer]
            self._transfer.copy_in([expert], self._blocks(part, slot))
            moved += row_bytes(part.sources)
            part.slots[expert] = slot
            self._is_resident[number] = True
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
