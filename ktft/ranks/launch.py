"""What the launcher says: this process's rank among those that train together, and what accelerate is to do."""

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


LAUNCHED_LAYOUT = "ACCELERATE_USE_PARALLELISM_CONFIG"
LAUNCHES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    LAUNCHED_LAYOUT: "tensor, context or data parallelism of accelerate",
}
"""Environment variables that make accelerate divide a model as ktft does not support -> what each one asks for."""


def launched_as() -> tuple[str, str] | None:
    """The first variable of `LAUNCHES` that is on in this process, and its `NAME=value`; None if all are off."""
    on = (name for name in LAUNCHES if _is_on(name))
    return next(((name, f"{name}={os.environ[name]}") for name in on), None)


FSDP_CURE = (
    "ktft supports FSDP2, and not FSDP1: set version: 2 in fsdp_config, or fsdp_version: 2 in accelerate's "
    "configuration (FSDP_VERSION=2)"
)


def fsdp_version() -> int | None:
    """The version of FSDP that the environment asks accelerate for; None if it asks for none."""
    if not _is_on("ACCELERATE_USE_FSDP"):
        return None
    text = os.environ.get("FSDP_VERSION", "1")
    return int(text) if text.isdigit() else 1


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "").lower() not in ("", "0", "n", "no", "f", "false", "off")
