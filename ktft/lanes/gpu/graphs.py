"""Kernels that do the same to the same memory every time, given to a GPU as one: recorded in graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ktft.device import device_of

logger = logging.getLogger("ktft")
MOST = 1024
"""The most recordings of one `Recorded`, which keeps each as long as it lives."""


class Recorded:
    """Work by what it depends on. The second time it is recorded, since the first one may compile its kernels; from
    then on it is one launch. Work is done each time on a device that records no graphs, and unless `on`.
    """

    def __init__(self, device: torch.device, on: bool = True) -> None:
        self._device = device_of(device)
        self._on = on and self._device.records_graphs
        self._pool = self._device.graph_pool() if self._on else None
        self._graphs: dict[Hashable, Any] = {}

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Give the current stream this work, which launches kernels and does not wait. Memory that it allocates belongs
        to all work that is recorded here, so it must need none of it once it is done.

        `key` is equal for equal work: addresses, sizes, numbers. With None the work is not worth being recorded.
        """
        if not self._on or key is None:
            work()
        elif key not in self._graphs:
            work()
            if len(self._graphs) < MOST:
                self._graphs[key] = None
        elif (graph := self._graphs[key] or self._record(key, work)) is not None:
            graph.replay()
        else:
            work()

    def _record(self, key: Hashable, work: Callable[[], None]) -> Any:
        graph = self._device.new_graph(self._pool)
        try:
            graph.begin()
            try:
                work()
            finally:
                graph.end()
        except RuntimeError as error:
            self._on = False
            logger.info("kernels cannot be recorded here, and are launched one by one: %s", str(error).splitlines()[0])
            return None
        self._graphs[key] = graph
        return graph
