"""Kernels that do the same to the same memory every time, given to a GPU as one: recorded in CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch

logger = logging.getLogger("ktft")


class Recorded:
    """Work by what it depends on. The second time it is recorded, since the first one may compile its kernels; from
    then on it is one launch.

    Args:
        device: `cuda:N`; elsewhere work is done each time.
        on: whether to record.
    """

    def __init__(self, device: torch.device, on: bool = True) -> None:
        self._on = on and device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._stream = torch.cuda.Stream(device) if self._on else None

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Give the current stream this work, which launches kernels and neither allocates memory nor waits.

        Args:
            key: equal for equal work: addresses, sizes, numbers. None: the work is not worth being recorded.
            work: calls the kernels.
        """
        if not self._on or key is None:
            work()
        elif key not in self._graphs:
            work()
            self._graphs[key] = None
        elif (graph := self._graphs[key] or self._record(key, work)) is not None:
            graph.replay()
        else:
            work()

    def _record(self, key: Hashable, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self._on = False
            logger.info("kernels cannot be recorded here, and are launched one by one: %s", str(error).splitlines()[0])
            return None
        self._graphs[key] = graph
        return graph
