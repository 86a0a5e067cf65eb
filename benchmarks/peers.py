"""The peers that `ktft bench kernels` knows."""

from __future__ import annotations

from benchmarks.peer import Peer
from benchmarks.peer_kt import KT_KERNEL
from benchmarks.peer_self import SELF_PEERS
from benchmarks.peer_torch import TORCH_PEERS

LIBRARIES: tuple[Peer, ...] = (*TORCH_PEERS, KT_KERNEL)
PEERS: tuple[Peer, ...] = (*LIBRARIES, *SELF_PEERS)
