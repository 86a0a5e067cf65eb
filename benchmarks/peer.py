"""The interface of a peer: another implementation of the routed experts, timed beside ktft's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from benchmarks.cases import Case
from benchmarks.layers import Batch, Ktft, Runner, Weights
from ktft.lora import ExpertLora


@dataclass(frozen=True)
class Job:
    """The input from which a peer makes the same layer: the largest case with its batch, the weights and adapters, and
    the ktft layers that the peer is timed beside.
    """

    case: Case
    weights: Weights
    lora: ExpertLora | None
    batch: Batch
    ktft: Ktft

    @property
    def copies(self) -> int:
        """The number of copies of the weights to rotate over."""
        return len(self.ktft.layers)

    @property
    def threads(self) -> int:
        """The number of threads that compute."""
        return self.ktft.layers[0].runtime.threads


class Peer(Protocol):
    """One row of `benchmarks.peers.PEERS`."""

    @property
    def name(self) -> str:
        """The peer's name for `--peer`."""

    def absent(self) -> str:
        """Why it cannot run here; empty if it can."""

    def make(self, job: Job) -> Runner:
        """Make the layer, ready to run. Raises ValueError with the reason if the peer cannot run this case."""
