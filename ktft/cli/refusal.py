"""Ends a command that cannot do what it was asked: with one message and exit status 2."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.text import Text


def refuse(error: Exception | str) -> Exception:
    """Tell the user what is wrong. Returns the exception to raise: an exit, or the error itself if it shows a bug."""
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
