"""The peers that `ktft bench kernels` knows."""

from __future__ import annotations

from benchmarks.peer import Peer
from benchmarks.peer_kt import KtKernel
from benchmarks.peer_self import SELF_PEERS
from benchmarks.peer_torch import TorchEager, TorchGrouped

LIBRARIES: tuple[Peer, ...] = (TorchEager(), TorchGrouped(), KtKernel())
PEERS: tuple[Peer, ...] = (*LIBRARIES, *SELF_PEERS)
