"""Shared by the scripts that kill ktft's commands. Each run is a fork of a process that has done all imports."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import in_a_process


def hashes(folder: Path) -> dict[str, str]:
    """File name -> SHA-256."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


os.environ["OMP_NUM_THREADS"] = "1"  # on a busy machine, threads that wait for each other make no progress
HOUR = 3600


def jump_clock() -> None:
    """Make this process's clock jump an hour forth or back every half second."""
    real = time.time

    def jumping() -> float:
        now = real()
        return now + HOUR * (int(2 * now) % 3 - 1)

    time.time = jumping
    time.time_ns = lambda: int(jumping() * 1e9)


class JumpingTimes:
    """Gives new files in a folder the times they would have if the clock had just jumped by up to an hour."""

    def __init__(self, folder: Path, pattern: str, chance: random.Random) -> None:
        self.folder, self.pattern, self.chance = folder, pattern, chance
        self.seen: dict[int, str] = {}  # inode -> name: a replaced file counts as new

    def touch(self) -> None:
        """Change the times of new files."""
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
    """Start or continue a `ktft` command without output. Returns its process id."""
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


def wait(child: int, seconds: float, until: Callable[[], bool] = lambda: False) -> int | None:
    """The exit status, or minus the signal that ended it. None if it still runs after `seconds` or once `until()`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not until():
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def hunt(command: tuple[str, ...], unfinished: str, wanted: int, make: Callable[..., None], *given: Any) -> int:
    """Run a command without interruption, then kill it at random moments and run it again, until enough were killed.

    Args:
        command: the words, with `{folder}` for a temporary folder. The output path is added at the end.
        unfinished: the name of what a killed command leaves beside the output; "out" if it is the output itself.
        wanted: how many kills.
        make: `make(folder, *given)` writes what the command reads.

    Returns:
        The exit status: 1 if a finished output has other bytes than that of the uninterrupted command.
    """
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        folder, what = Path(name), command[0]
        in_a_process(make, folder, *given)
        words = [word.format(folder=folder) for word in command]
        out, left, begin = folder / "out", folder / unfinished, time.monotonic()
        if status := wait(start(*words, str(folder / "whole")), float("inf")):
            sys.exit(f"the uninterrupted {what} exited with {status}")
        total, expected = time.monotonic() - begin, hashes(folder / "whole")
        print(f"seed {seed}; uninterrupted {total:.1f} s, {len(expected)} files", flush=True)
        kills = finished = half_written = 0
        times = JumpingTimes(folder, f"{unfinished}/**/*", chance)
        while kills < wanted or left.exists():
            times.touch()
            child, moment = start(*words, str(out), jumping=True), chance.uniform(0, total)
            status = wait(child, moment if kills < wanted else float("inf"))
            if status is None:
                kill(child)
                kills += 1
                files, half = len(list(left.rglob("*.safetensors"))), len(list(left.rglob("*.ktft-tmp")))
                half_written += half
                print(f"kill {kills} after {moment:.2f} s: {files} files, {half} half written", flush=True)
                if left.exists() or not out.exists():
                    continue
            same = not status and out.exists() and hashes(out) == expected
            print("finished:", "the same bytes" if same else f"DIFFERENT, exit status {status}", flush=True)
            if not same:
                return 1
            finished += 1
            shutil.rmtree(out)
        print(f"ok: {kills} kills, {half_written} files half written, {finished} times the same bytes")
    return 0
