"""ktft's commands in the test's own process."""

from __future__ import annotations

import functools
from typing import Any

from typer import testing
from typer.testing import CliRunner, Result

from ktft.cli.main import app

# The runner would make all of the app's commands anew for each one that it runs
testing._get_command = functools.cache(testing._get_command)


def invoke(*arguments: object, **how: Any) -> Result:
    """Run a command without wrapping its lines. Errors that ktft does not expect are raised."""
    runner = CliRunner(env={"COLUMNS": "500"})
    return runner.invoke(app, [str(each) for each in arguments], catch_exceptions=False, **how)


def run(*arguments: object) -> tuple[int, str]:
    """Run a command. Returns its exit status and all output."""
    result = invoke(*arguments)
    return result.exit_code, result.output


def refused(*arguments: object) -> str:
    """Run a command that must refuse its arguments. Returns what it says."""
    status, said = run(*arguments)
    assert status == 2, said
    return said
