"""The interface of a peer: another implementation of the routed experts, timed beside ktft's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Peer:
    """One row of `benchmarks.kernels.PEERS`.

    Attributes:
        name: the peer's name for `--peer`.
        make: makes the layer, ready to run. It raises ValueError with the reason if the peer cannot run this case.
        absent: gives the reason why the peer cannot run here; empty if it can.
    """

    name: str
    make: Callable[[Job], Runner]
    absent: Callable[[], str] = str
