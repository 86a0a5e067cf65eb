"""How many tokens each expert gets while serving, and the time of each lane, counted without a wait for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ktft.device import device_of
from ktft.lanes.passes import Pass
from ktft.lanes.terms import Where
from ktft.native import ExpertLayer
from ktft.native.hybrid import HostExperts
from ktft.serve.runtime.resident_experts import HotExperts


class Heat:
    """The (token, expert) pairs since the start.

    In calls with few tokens the device counts the pairs of residents and `HostExperts` those of the CPU. The pairs of
    prefill are counted here.

    Args:
        layers: the model's layers with experts, in order.
        host: the CPU's counts for calls with few tokens.
        hot: the GPU's counts for calls with few tokens; None without residents.
        top_k: experts of a token.
    """

    def __init__(self, layers: Sequence[ExpertLayer], host: HostExperts, hot: HotExperts | None, top_k: int) -> None:
        self._layers, self._host, self._hot, self._top_k = layers, host, hot, top_k
        self._unread: deque[Pass] = deque(maxlen=4096)
        self._asked: tuple[Tensor, Any] | None = None
        self.clear()

    def clear(self) -> None:
        """Forget what was counted, since its tokens were made up. Waits for the device."""
        most = max(layer.num_experts for layer in self._layers)
        self._many = torch.zeros(len(self._layers), most, dtype=torch.int64)
        self._before = torch.zeros_like(self._many)
        self._pairs, self._calls = dict.fromkeys(Where, 0), dict.fromkeys(Where, 0)
        self._seconds = dict.fromkeys(Where, 0.0)
        self._unread.clear()
        self._start = self._few()

    def add(self, place: int, run: Pass, counts: Sequence[int]) -> None:
        """Count a layer's prefill, which its lanes have taken on."""
        self._many[place, : len(counts)] += torch.tensor(counts)
        for where in Where:
            experts = run.placement.experts(where)
            self._pairs[where] += sum(counts[expert] for expert in experts)
            self._calls[where] += bool(experts)
        self._seconds[Where.CPU] += run.cpu_seconds
        if run.events:
            self._unread.append(run)
        while self._unread and all(event.query() for event in self._unread[0].events):
            first = self._unread.popleft()
            _, began, _, ended = first.events
            where = Where.STREAM if first.placement.stream else Where.RESIDENT
            self._seconds[where] += began.elapsed_time(ended) / 1e3

    def ask(self) -> None:
        """Begin to copy the device's counts to the host."""
        if self._hot is None or self._asked is not None:
            return
        heat, device = self._hot.heat, device_of(self._hot.heat.device)
        host = torch.empty(heat.shape, dtype=heat.dtype, pin_memory=device.pin_memory).copy_(heat, non_blocking=True)
        event = device.event()
        event.record()
        self._asked = host, event

    def arrived(self) -> list[list[int]] | None:
        """The pairs since the last time, by layer and expert, once the copy that `ask` began is done; None before."""
        if self._asked is None or not self._asked[1].query():
            return None
        (resident, _), self._asked = self._asked, None
        now = self._many + (self._few(resident) - self._start).sum(0)
        since, self._before = now - self._before, now
        return [row[: layer.num_experts].tolist() for row, layer in zip(since, self._layers, strict=True)]

    def totals(self) -> list[list[int]]:
        """All pairs by layer and expert. Waits for the device."""
        now = self._many + (self._few() - self._start).sum(0)
        return [row[: layer.num_experts].tolist() for row, layer in zip(now, self._layers, strict=True)]

    def lanes(self) -> dict[str, dict[str, float]]:
        """(token, expert) pairs, tokens (pairs over `top_k`), seconds and calls of each lane.

        Calls are prefill's only, as are the seconds of residents: the host neither sees nor times what a CUDA graph
        replays.
        """
        resident, cpu = (self._few() - self._start).sum((1, 2)).tolist()
        pairs, seconds = dict(self._pairs), dict(self._seconds)
        pairs[Where.RESIDENT] += resident
        pairs[Where.CPU] += cpu
        seconds[Where.CPU] += sum(self._host.seconds(layer) for layer in self._layers)
        return {
            where: {
                "pairs": pairs[where],
                "tokens": pairs[where] / self._top_k,
                "seconds": seconds[where],
                "calls": self._calls[where],
            }
            for where in Where
        }

    def _few(self, resident: Tensor | None = None) -> Tensor:
        """`[2, layers, experts]`: the pairs of calls with few tokens, of residents and of the CPU.

        Those of residents are `resident`, if it was copied before; otherwise this waits for the device.
        """
        few = self._many.new_zeros(2, *self._many.shape)
        if self._hot is not None:
            few[0] = self._hot.heat if resident is None else resident
        for row, layer in zip(few[1], self._layers, strict=True):
            row[: layer.num_experts] = self._host.counts(layer)
        return few
