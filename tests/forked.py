"""Commands as a user types them, in processes that have already imported torch and LLaMA-Factory.

Imports take far longer than most tests of a command. So one process for all workers of pytest imports everything that
commands need and then only forks. Each fork runs a command's script with its own arguments, environment, working
directory and output. The interpreter ends it like any process: exit status, exception hook and exit handlers are real.
Only what it does after them is left out: to take all modules apart, for a second. A command that replaces itself by
another program of Python (`ktft train`) goes on in the same process.

What a library reads from the environment at its import is what that one process had. Tests of the hook in
`import torch` and of torchrun start a process of their own (`run_cli`).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

LIMIT = 600
"""Seconds after which a command that still runs is killed."""

MODULES = (
    "llamafactory.launcher",
    "torch",
    "llamafactory.train.tuner",
    "ktft.cli.main",
    "ktft.train.run_report_page",
    "plots",
    "transformers.models.deepseek_v2.modeling_deepseek_v2",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
)
"""What commands import, in the order of `llamafactory-cli train`."""

LIBRARIES = ("torch", "transformers.trainer", "peft", "datasets")
"""What programs import that have to find ktft, LLaMA-Factory and TRL not imported."""


class Fork:
    """A command that has been started; `pid` is its process."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self.pid = pid
        self._forks = forks
        self._status: int | None = None

    def poll(self) -> int | None:
        """The exit status, or None while the command runs."""
        if self._status is None:
            self._status = self._forks.ask(poll=self.pid)
        return self._status

    def wait(self) -> int:
        """The exit status, once the command has ended."""
        if self._status is None:
            self._status = self._forks.ask(wait=self.pid)
            assert self._status is not None
        return self._status

    def kill(self) -> None:
        """End the command if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


class Forks:
    """Runs commands. The first one starts the process from which they are forked, if no other worker has."""

    def __init__(
        self,
        folder: Path,
        modules: Sequence[str] = MODULES,
        beneath: Forks | None = None,
        python: Path | str = sys.executable,
    ) -> None:
        """The folder holds the commands' output and the cache of `datasets`; `python` imports `modules` once.

        That process is itself a fork of the one of `beneath`, whose modules it need not import again.
        """
        self._folder, self._modules, self._beneath, self._python = folder, list(modules), beneath, str(python)
        self._connection: Any = None

    def run(self, command: list[str], environment: dict[str, str], **how: Any) -> subprocess.CompletedProcess[str]:
        """Run a command as `subprocess.run` would; `stdout` holds both streams. `how` is as for `start`."""
        output = self._folder / "output"
        status = self.start(command, environment, output, **how).wait()
        return subprocess.CompletedProcess(command, status, output.read_text())

    def start(
        self,
        command: list[str],
        environment: dict[str, str],
        stdout: Path | str,
        *,
        stdin: Path | str = os.devnull,
        stderr: Path | str | None = None,
        open_files: int | None = None,
    ) -> Fork | subprocess.Popen[bytes]:
        """Start a command. `command[0]` is a Python script.

        It is a process of its own on a machine with a GPU, which a fork cannot use once its parent has asked about it.

        Args:
            command: the script and its arguments.
            environment: the command's own.
            stdout: a file, pipe or terminal, by its path.
            stdin: the same.
            stderr: the same; None is where stdout goes.
            open_files: how many files the command may have open.
        """
        import torch

        if torch.cuda.is_available():
            words = f"ulimit -n {open_files} && " if open_files else ""
            words += f'exec "$@" < {quote(str(stdin))} > {quote(str(stdout))} '
            words += f"2> {quote(str(stderr))}" if stderr else "2>&1"
            return subprocess.Popen(["sh", "-c", words, "sh", self._python, *command], env=environment)
        streams = {"stdin": str(stdin), "stdout": str(stdout), "stderr": stderr and str(stderr)}
        request = {"command": command, "environment": environment, "cwd": os.getcwd(), "open_files": open_files}
        pid = self.ask(**request | streams)
        assert pid is not None
        return Fork(self, pid)

    def ask(self, **request: Any) -> int | None:
        """What the process that forks answers."""
        if self._connection is None:
            self._connection = self._connect().makefile("rw")
        print(json.dumps(request), file=self._connection, flush=True)
        answer = self._connection.readline()
        assert answer, "the process that forks has ended"
        found: int | None = json.loads(answer)
        return found

    def _connect(self) -> socket.socket:
        """A connection to the process that forks, which takes it once all is imported."""
        session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        name = f"ktft-{session}-{zlib.crc32(' '.join([self._python, *self._modules]).encode())}"
        connection, deadline, starting = socket.socket(socket.AF_UNIX), time.monotonic() + LIMIT, None
        while connection.connect_ex("\0" + name):
            if starting is None or starting.poll() is not None:  # another one may have ended just now
                starting = self._start(name)
            assert time.monotonic() < deadline, "the process that forks does not start"
            time.sleep(0.02)
        return connection

    def _start(self, name: str) -> Fork | subprocess.Popen[bytes]:
        """Start the process that forks; it ends at once if there is one of this name."""
        command = [__file__, name, *self._modules]
        own = os.environ | {"HF_DATASETS_CACHE": str(self._folder / "cache")}
        if self._beneath is None:
            return subprocess.Popen([self._python, *command], env=own, stdin=subprocess.DEVNULL)
        return self._beneath.start(command, own, self._folder / "imports")

    def close(self) -> None:
        """Let the process from which commands are forked end, once no other worker needs it."""
        if self._connection is not None:
            self._connection.close()


def _main(name: str, *modules: str) -> None:
    """Import the modules, then fork for all who connect to this name. Returns in each command's process too."""
    signal.alarm(LIMIT)  # whoever started this process may have ended
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind("\0" + name)
    except OSError:
        return
    listening.listen()
    gc.disable()  # a quarter of the time that imports take
    for module in modules:
        importlib.import_module(module)
    if modules == MODULES:
        # Asking whether a model takes images imports the configurations of 100 models.
        sys.modules["transformers"].AutoModelForImageTextToText._model_mapping.keys()
        sys.modules["plots"].leave_out()
    gc.freeze()  # or each child, as it ends, would copy every page of what it shares
    gc.enable()
    clients: set[int] = set()
    connected = False
    while clients or not connected:
        if select.select([listening], [], [], 1.0)[0]:
            connected, client = True, listening.accept()[0]
            signal.alarm(0)
            clients.add(os.fork())
            if 0 in clients:
                listening.close()
                return _serve(client)
            client.close()
        clients = {each for each in clients if not os.waitpid(each, os.WNOHANG)[0]}


def _serve(client: socket.socket) -> None:
    """Answer each line of a client, which is a request. Returns when there are no more, and in a command's process."""
    lines = client.makefile("rw")
    client.close()
    while line := lines.readline():
        request = json.loads(line)
        if "command" in request:
            answer: int | None = os.fork()
            if not answer:
                lines.close()
                return _run(**request)
        else:
            pid, status = os.waitpid(*((request["wait"], 0) if "wait" in request else (request["poll"], os.WNOHANG)))
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), file=lines, flush=True)


class _Ending:
    """The last exit handler of a process that forks and of all its forks, since it is registered before all others."""

    def __init__(self) -> None:
        """`status` is the exit status; None leaves it to the interpreter."""
        self.status: int | None = 0
        atexit.register(self)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Take note of the exit status that the block ends with. An exception's is up to the hook for exceptions."""
        self.status = None
        try:
            yield
        except SystemExit as end:
            self.status = end.code & 0xFF if isinstance(end.code, int) else int(end.code is not None)
            raise
        self.status = 0

    def __call__(self) -> None:
        """End this process. The interpreter does it where output cannot be written, which it has words for."""
        if self.status is not None:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(self.status)


_ending: _Ending | None = None


def _run(
    command: list[str],
    environment: dict[str, str],
    cwd: str,
    stdin: str,
    stdout: str,
    stderr: str | None,
    open_files: int | None,
) -> None:
    """Run the command in this process. Its exceptions are left to the interpreter."""
    signal.alarm(LIMIT)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # it may have been asked for, by another environment
    how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOCTTY
    for path, mode, stream in ((stdout, how, 1), (stderr, how, 2), (stdin, os.O_RDONLY, 0)):
        opened = os.open(path, mode) if path else os.dup(1)
        os.dup2(opened, stream)
        os.close(opened)
    sys.stdin = os.fdopen(0)
    if open_files is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    os.execve = _replace  # type: ignore[assignment]
    assert _ending is not None
    with _ending.watched():
        try:
            runpy.run_path(command[0], run_name="__main__")
        except _ReplacedError as by:
            sys.excepthook, sys.argv = sys.__excepthook__, by.command
            del sys.path[0]
            os.environ.clear()
            os.environ.update(by.environment)
            runpy.run_module(by.command[0], run_name="__main__", alter_sys=True)


class _ReplacedError(BaseException):
    """A command replaces itself by a module of Python, with a command's words and an environment."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self.command, self.environment = command, environment


def _replace(program: str, command: list[str], environment: Mapping[str, str]) -> None:
    """`os.execve`, which would import everything again. All of the command that stands above is left."""
    assert [program, *command[:3]] == [sys.executable, sys.executable, "-P", "-m"], command
    raise _ReplacedError(command[3:], environment)


if __name__ == "__main__":
    import forked  # once for a process and all its forks, which may run this script too

    forked._ending = forked._ending or forked._Ending()
    forked._main(*sys.argv[1:])
