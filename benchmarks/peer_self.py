"""ktft under another condition as a peer, which shows pair by pair the cost of LoRA, skewed routing or a thread."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from benchmarks import layers
from benchmarks.layers import Batch, Ktft, Runner
from benchmarks.peer import Job, Peer
from ktft import native


@dataclass
class _EvenlyRouted:
    """The same layers on as many tokens, routed evenly."""

    job: Job
    has_backward: bool = True
    _batches: dict[int, Batch] = field(default_factory=dict)

    def _even(self, batch: Batch) -> Batch:
        tokens = len(batch.x)
        if tokens not in self._batches:  # in the warm-up run, which is not counted
            self._batches[tokens] = layers.make_batch(replace(self.job.case, tokens=tokens, routing="uniform"))
        return self._batches[tokens]

    def forward(self, batch: Batch) -> Tensor:
        return self.job.ktft.forward(self._even(batch))

    def train(self, batch: Batch) -> Callable[[], object]:
        return self.job.ktft.train(self._even(batch))


def _without_lora(job: Job) -> Runner:
    if job.lora is None:
        raise ValueError("the rank is 0")
    bare = copy.copy(job.ktft)
    bare.lora = None
    return bare


def _with_a_thread_less(job: Job) -> Runner:
    if job.threads < 2:
        raise ValueError("there is one thread")
    runtime = native.runtime(job.threads - 1)
    return Ktft(job.case.shape, job.case.format, runtime, job.weights, job.lora)


SELF_PEERS = (
    Peer("no-lora", _without_lora),
    Peer("uniform", _EvenlyRouted),
    Peer("thread-less", _with_a_thread_less),
)
"""These are timed only on request. The ratio is the condition's time over ktft's; below 1, it shows the cost."""
