"""Commands as a user types them, in processes that have already imported torch and LLaMA-Factory.

Imports take far longer than most tests of a command. So one process for each worker of pytest imports everything that
commands need and then only forks. Each fork runs a command's script with its own arguments, environment, working
directory and output. The interpreter ends it like any process: exit status, exception hook and exit handlers are real.

What a library reads from the environment at its import is what that one process had. Tests of the hook in
`import torch` and of torchrun start a process of their own (`run_cli`).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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
    """Runs commands. The first one starts the process from which they are forked."""

    def __init__(self, folder: Path, modules: Sequence[str] = MODULES, python: Path | str = sys.executable) -> None:
        """The folder holds the commands' output and the cache of `datasets`; `python` imports `modules` once."""
        self._folder, self._modules, self._python = folder, modules, str(python)
        self._process: subprocess.Popen[str] | None = None

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
        if sys.modules["torch"].cuda.is_available():
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
        if self._process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            own = os.environ | {"HF_DATASETS_CACHE": str(self._folder / "cache")}
            self._process = subprocess.Popen([self._python, __file__, *self._modules], env=own, **pipes)
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process that forks has ended"
        found: int | None = json.loads(answer)
        return found

    def close(self) -> None:
        """End the process from which commands are forked."""
        if self._process is not None:
            self._process.communicate()
            assert self._process.returncode == 0


def _serve(modules: Sequence[str]) -> None:
    """Answer each line of stdin, which is a request. Returns when stdin ends, and in each command's process."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    for name in modules:
        importlib.import_module(name)
    if modules == list(MODULES):
        # Asking whether a model takes images imports the configurations of 100 models.
        sys.modules["transformers"].AutoModelForImageTextToText._model_mapping.keys()
        sys.modules["plots"].leave_out()
    gc.freeze()  # or each child, as it ends, would copy every page of what it shares
    for line in sys.stdin:
        request = json.loads(line)
        if "command" in request:
            answer: int | None = os.fork()
            if not answer:
                answers.close()
                _run(**request)
                return
        else:
            pid, status = os.waitpid(*((request["wait"], 0) if "wait" in request else (request["poll"], os.WNOHANG)))
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), file=answers, flush=True)


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
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    _serve(sys.argv[1:])
