"""What the scripts that kill ktft's commands share. A run of a command is a fork of a process that has imported all."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path


def hashes(folder: Path) -> dict[str, str]:
    """File name -> SHA-256."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def start(*arguments: str) -> int:
    """Begin a `ktft` command, or go on with it, without output. Returns the process."""
    from ktft.cli.main import app

    child = os.fork()
    if child == 0:
        status = 99
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            app(arguments, standalone_mode=False)
            status = 0
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
