"""`ktft export`: an adapter in the form that another program loads. torch is imported when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text


def export(
    adapter: Annotated[Path, typer.Argument(help="Directory of an adapter that ktft saved.")],
    out: Annotated[Path, typer.Argument(help="Directory to write, new or empty.")],
    target: Annotated[str, typer.Option("--to", help="vllm, sglang, gguf (llama.cpp) or peft (on transformers 5).")],
    base: Annotated[
        Path | None, typer.Option(help="The base model's directory or config.json. [the one the adapter names]")
    ] = None,
) -> None:
    """Write an adapter in the form that another program loads; refuse what it could not hold or would not apply."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    console = Console(stderr=True)
    try:
        usage = _export(adapter, out, target, base, console)
    except (OSError, ValueError) as error:
        console.print(Text(str(error), style="red"), soft_wrap=True)
        raise typer.Exit(2) from None
    typer.echo(f"{out}: written. Use it as in\n  {usage}")


def _export(adapter: Path, out: Path, target: str, base: Path | None, console: Console) -> str:
    from ktft.adapters import export
    from ktft.cli.progress import progress_bar

    if target not in export.TARGETS:
        raise ValueError(f"--to {target}: ktft exports to {', '.join(export.TARGETS)}")
    with console.status(f"reading {adapter} ..."):
        opened = export.open_adapter(adapter, base)
        planned = export.plan(opened, target)
    with progress_bar(planned.nbytes, console) as progress:
        return export.export(opened, target, planned, out, progress)
