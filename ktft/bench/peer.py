"""What a peer is: another implementation of the routed experts, timed beside ktft's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from ktft.bench.cases import Case
from ktft.bench.layers import Batch, Runner, Weights
from ktft.lora import ExpertLora


@dataclass(frozen=True)
class Job:
    """What a peer needs to make the same layer: its largest case and that one's batch, weights and adapters."""

    case: Case
    weights: Weights
    lora: ExpertLora | None
    batch: Batch
    copies: int
    threads: int


class Peer(Protocol):
    """One row of `ktft.bench.peers.PEERS`."""

    name: ClassVar[str]

    def absent(self) -> str:
        """Why it cannot run here; empty if it can."""

    def make(self, job: Job) -> Runner:
        """The layer, ready to run. Raises ValueError with the reason when it cannot run this case."""
