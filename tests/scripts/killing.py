"""What the scripts that kill ktft's commands share. A run of a command is a fork of a process that has imported all."""

from __future__ import annotations

import hashlib
import os
import random
import time
from pathlib import Path


def hashes(folder: Path) -> dict[str, str]:
    """File name -> SHA-256."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


os.environ["OMP_NUM_THREADS"] = "1"  # threads that wait for each other stand still on a busy machine
HOUR = 3600


def jump_clock() -> None:
    """Have this process's clock jump an hour forth or back every half second."""
    real = time.time

    def jumping() -> float:
        now = real()
        return now + HOUR * (int(2 * now) % 3 - 1)

    time.time = jumping
    time.time_ns = lambda: int(jumping() * 1e9)


class JumpingTimes:
    """Gives what appears in a folder the times that it would have if the clock had just jumped, by an hour at most."""

    def __init__(self, folder: Path, pattern: str, chance: random.Random) -> None:
        self.folder, self.pattern, self.chance = folder, pattern, chance
        self.seen: dict[int, str] = {}  # inode -> name: one that was replaced is new

    def touch(self) -> None:
        """Do so to what is new."""
        for path in self.folder.glob(self.pattern):
            try:
                inode = path.stat().st_ino
                if self.seen.get(inode) != path.name:
                    when = time.time() + self.chance.choice((-1, 0, 1)) * HOUR
                    os.utime(path, (when, when))
                    self.seen[inode] = path.name
            except FileNotFoundError:
                continue


def start(*arguments: str, jumping: bool = False) -> int:
    """Begin a `ktft` command, or go on with it, without output. Returns the process."""
    from ktft.cli.main import app

    child = os.fork()
    if child == 0:
        status = 99
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            if jumping:
                jump_clock()
            status = app(arguments, standalone_mode=False) or 0  # typer returns what a refusal exits with
        finally:
            os._exit(status)
    return child


def wait(child: int, seconds: float) -> int | None:
    """Its exit status, minus the signal if one ended it; None if it runs on."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None
