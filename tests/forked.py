"""Commands as a user types them, in processes that have already imported torch and LLaMA-Factory.

Imports take far longer than most tests of a command. So one process for each worker of pytest imports everything that
commands need and then only forks. Each fork runs a command's script with its own arguments, environment, working
directory and output. The interpreter ends it like any process: exit status, exception hook and exit handlers are real.

What a library reads from the environment at its import is what that one process had. Tests of the hook in
`import torch`, of torchrun and of signals start a process of their own (`run_cli`).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
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


class Forks:
    """Runs commands, one at a time. The first one starts the process from which they are forked."""

    def __init__(self, folder: Path) -> None:
        """The folder holds the commands' output and the cache of `datasets`."""
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def run(self, command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command as `subprocess.run` would. `command[0]` is a Python script; `stdout` holds both streams."""
        if self._process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            own = os.environ | {"HF_DATASETS_CACHE": str(self._folder / "cache")}
            self._process = subprocess.Popen([sys.executable, __file__], env=own, **pipes)
        assert self._process.stdin is not None and self._process.stdout is not None
        output = self._folder / "output"
        request = {"command": command, "environment": environment, "cwd": os.getcwd(), "output": str(output)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        status = self._process.stdout.readline()
        assert status, "the process that forks has ended"
        return subprocess.CompletedProcess(command, int(status), output.read_text())

    def close(self) -> None:
        """End the process from which commands are forked."""
        if self._process is not None:
            self._process.communicate()
            assert self._process.returncode == 0


def _serve() -> None:
    """Fork for each line of stdin, which is a request, and answer with the exit status. Returns when stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    for name in MODULES:
        importlib.import_module(name)
    # Asking whether a model takes images imports the configurations of 100 models.
    sys.modules["transformers"].AutoModelForImageTextToText._model_mapping.keys()
    sys.modules["plots"].leave_out()
    gc.freeze()  # or each child, as it ends, would copy every page of what it shares
    for line in sys.stdin:
        child = os.fork()
        if not child:
            answers.close()
            _run(**json.loads(line))
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


def _run(command: list[str], environment: dict[str, str], cwd: str, output: str) -> None:
    """Run the command in this process. Its exceptions are left to the interpreter."""
    signal.alarm(LIMIT)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)
    log = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = command
    sys.path[0] = str(Path(command[0]).parent)
    runpy.run_path(command[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
