"""`ktft export`: an adapter in the form that another program loads. torch is imported when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from ktft.cli.progress import progress_bar


def export(
    adapter: Annotated[Path, typer.Argument(help="Directory of an adapter that ktft saved.")],
    out: Annotated[Path, typer.Argument(help="Directory to write, new or empty.")],
    target: Annotated[
        Literal["peft", "vllm", "sglang", "gguf"],
        typer.Option("--to", help="The program; gguf is llama.cpp's, peft is PEFT on transformers 5."),
    ],
    base: Annotated[
        Path | None, typer.Option(help="The base model's directory or config.json. [the one the adapter names]")
    ] = None,
) -> None:
    """Write an adapter in the form that another program loads; refuse what it could not hold or would not apply."""
    from ktft.checkpoint.hub import local_path

    local_path("adapter", adapter)  # before torch is imported, which takes seconds
    if base is not None:
        local_path("--base", base)
    from transformers.utils import logging

    logging.set_verbosity_error()
    from ktft.adapters import export

    console = Console(stderr=True)
    with console.status(f"reading {adapter} ..."):
        opened = export.open_adapter(adapter, base)
        planned = export.plan(opened, target)
    with progress_bar(planned.nbytes, console) as progress:
        usage = export.export(opened, target, planned, out, progress)
    typer.echo(f"{out}: written. Use it as in\n  {usage}")
