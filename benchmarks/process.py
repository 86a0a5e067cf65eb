"""Processes that a benchmark starts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Self

_ERROR = re.compile(r"\w*(Error|Exception): ")
_NOISE = re.compile(r"nanobind: |See https://nanobind|\s*- (leaked|\.\.\. skipped) ")
"""What Python extensions made with nanobind print when a process ends early."""


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Started:
    """A process that imports the same packages as this one. What it prints is kept for messages.

    As a context manager it ends the process and all that this one started.

    Args:
        command: its command line.
        asked: whether its stdin and stdout are pipes to this process; otherwise stdin is empty and stdout is kept too.
        variables: for its environment, beside this process's own.
    """

    LAST_LINES: ClassVar[int] = 8  # that a message shows

    def __init__(
        self, command: list[str], asked: bool = False, variables: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if asked else subprocess.DEVNULL,
            stdout=subprocess.PIPE if asked else self._log,
            stderr=self._log,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def last_lines(self) -> str:
        """The last lines that it printed, behind the first error among all: what ends after it may print much."""
        self._log.seek(0)
        every = self._log.read().decode(errors="replace").splitlines()
        lines = [line for line in every if line.strip() and not _NOISE.match(line)]
        last, cause = lines[-self.LAST_LINES :], next(filter(_ERROR.match, lines), None)
        return " / ".join(last if cause is None or cause in last else [cause, *last])

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
