"""The peers that `ktft bench kernels` knows."""

from __future__ import annotations

from ktft.bench.peer import Peer
from ktft.bench.peer_kt import KtKernel
from ktft.bench.peer_torch import TorchEager, TorchGrouped

PEERS: tuple[Peer, ...] = (TorchEager(), TorchGrouped(), KtKernel())
