"""How a command ends that was asked for something it cannot do: one message, exit status 2."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.text import Text


def refuse(error: Exception | str) -> Exception:
    """Tell the user what is wrong, and give back what to raise: an exit, or the error itself if it is a bug's."""
    from ktft.config import show_tracebacks
    from ktft.errors import exit_code, for_user

    code = 2
    if isinstance(error, Exception):
        told = for_user(error)
        if told is None or show_tracebacks():
            return error
        error, code = str(told), exit_code(told)
    Console(stderr=True).print(Text(error, style="red"), soft_wrap=True)
    return typer.Exit(code)
