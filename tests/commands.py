"""ktft's commands in the test's own process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner, Result

from ktft.cli.main import app


def invoke(*arguments: object, **how: Any) -> Result:
    """A command, whose lines are not wrapped. What ktft has no words for is raised."""
    runner = CliRunner(env={"COLUMNS": "500"})
    return runner.invoke(app, [str(each) for each in arguments], catch_exceptions=False, **how)


def run(*arguments: object) -> tuple[int, str]:
    """Exit status and all that was said."""
    result = invoke(*arguments)
    return result.exit_code, result.output


def refused(*arguments: object) -> str:
    """What a command says of what it does not take."""
    status, said = run(*arguments)
    assert status == 2, said
    return said
