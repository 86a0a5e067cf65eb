"""The peers that `ktft bench kernels` knows."""

from __future__ import annotations

from ktft.bench.peer import Peer
from ktft.bench.peer_kt import KtKernel
from ktft.bench.peer_self import SELF_PEERS
from ktft.bench.peer_torch import TorchEager, TorchGrouped

LIBRARIES: tuple[Peer, ...] = (TorchEager(), TorchGrouped(), KtKernel())
PEERS: tuple[Peer, ...] = (*LIBRARIES, *SELF_PEERS)
