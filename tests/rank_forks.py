"""Ranks without torchrun: forks of a process that has imported torch and transformers, once for all of them."""

from __future__ import annotations

import os
import signal
import sys
import time

from torch.distributed import TCPStore

PATIENCE = 20.0
"""Seconds that the other ranks get to end by themselves once one has failed."""


def fork(processes: int) -> None:
    """Return in each of this many ranks, which have the variables that torchrun sets.

    The process that calls this waits for them and ends with status 1 if one of them fails.
    """
    host, port = _host_store()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    common |= {"TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    ranks = []
    for rank in range(processes):
        ranks.append(os.fork())
        if not ranks[-1]:
            os.environ.update(common | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
            return
    status = _wait(ranks)
    os.kill(host, signal.SIGKILL)
    sys.exit(status)


def _host_store() -> tuple[int, str]:
    """The process number and the port of a process that holds the ranks' store until it is killed."""
    read, write = os.pipe()
    host = os.fork()
    if not host:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        os.close(write)
        while os.getppid() > 1:
            time.sleep(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        return host, said.read()


def _wait(ranks: list[int]) -> int:
    failed_at = None
    while ranks:
        for process in list(ranks):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                ranks.remove(process)
                failed_at = failed_at or (time.monotonic() if status else None)
            elif failed_at and time.monotonic() - failed_at > PATIENCE:
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)
    return int(failed_at is not None)
