"""What a peer is: another implementation of the routed experts, timed beside ktft's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from benchmarks.cases import Case
from benchmarks.layers import Batch, Ktft, Runner, Weights
from ktft.lora import ExpertLora


@dataclass(frozen=True)
class Job:
    """What a peer needs to make the same layer: its largest case and that one's batch, weights and adapters, and the
    layers that it is timed beside.
    """

    case: Case
    weights: Weights
    lora: ExpertLora | None
    batch: Batch
    ktft: Ktft

    @property
    def copies(self) -> int:
        """How many copies of the weights to rotate over."""
        return len(self.ktft.layers)

    @property
    def threads(self) -> int:
        """Threads that compute."""
        return self.ktft.layers[0].runtime.threads


class Peer(Protocol):
    """One row of `benchmarks.peers.PEERS`."""

    @property
    def name(self) -> str:
        """What `--peer` takes."""

    def absent(self) -> str:
        """Why it cannot run here; empty if it can."""

    def make(self, job: Job) -> Runner:
        """The layer, ready to run. Raises ValueError with the reason when it cannot run this case."""
