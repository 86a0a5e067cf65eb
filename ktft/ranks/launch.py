"""What the launcher says of this process: its rank among those that train together, and among those of its machine."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """The place of a process among those that torchrun, or a launcher with the same variables, started.

    Attributes:
        rank, ranks: this process's number, from 0, and how many processes train together on all machines.
        local_rank, local_ranks: the same among those of this machine.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1

    @classmethod
    def of_environment(cls) -> Launch:
        """What RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE say; one process without them."""
        rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        if ranks == 1:
            return cls()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return cls(rank, ranks, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))

    @property
    def name(self) -> str:
        """The process, for a message."""
        return f"rank {self.rank} on {socket.gethostname()}"
