"""How a command ends that was asked for something it cannot do: one message, exit status 2."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.text import Text


def refuse(error: Exception | str) -> Exception:
    """Tell the user what is wrong, and give back what to raise: an exit, or the error itself if it is a bug's."""
    from ktft.config import show_tracebacks
    from ktft.errors import exit_code, message_for_user

    if isinstance(error, str):
        words, code = error, 2
    else:
        words, code = message_for_user(error) or "", exit_code(error)
        if not words or show_tracebacks():
            return error
    Console(stderr=True).print(Text(words, style="red"), soft_wrap=True)
    return typer.Exit(code)
