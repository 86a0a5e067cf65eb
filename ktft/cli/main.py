"""The `ktft` command. Nothing here imports torch before a command needs it, so `ktft --help` is quick."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from ktft import versions
from ktft.cli import bench
from ktft.cli.chat import chat
from ktft.cli.convert import convert
from ktft.cli.export import export
from ktft.cli.merge import merge
from ktft.cli.plan import plan
from ktft.cli.refusal import refuse
from ktft.cli.serve import serve
from ktft.cli.verify import verify
from ktft.system import end_without_collections

ORDER = ("doctor", "plan", "train", "convert", "verify", "merge", "export", "serve", "chat", "bench", "version")
"""The commands as a newcomer needs them."""


class Commands(TyperGroup):
    """All commands. An error that is for the user ends any of them with its message alone."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In `ORDER`."""
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Exit status 2 for what the user can mend."""
        end_without_collections()
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # whoever reads, as `head`, has enough: typer ends the command without a word
            raise
        except (OSError, ValueError) as error:
            raise refuse(error) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Fine-tune Mixture-of-Experts models whose experts live in CPU memory.",
)

bench.add_to(app)
for command in (plan, convert, verify, merge, export, serve, chat):
    app.command()(command)

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
VERSION_PACKAGES = ("torch", "transformers", "peft", "accelerate", "llamafactory")


def isa() -> str:
    try:
        from ktft import native

        return native.default_isa()
    except Exception as error:
        return f"none: {error}"


@app.command()
def version() -> None:
    """Show the versions of ktft and of what it works with, and the instruction set it uses here."""
    rows = {"ktft": versions.version_of("ktft"), "isa": isa(), "python": platform.python_version()}
    rows |= {package: versions.version_of(package) for package in VERSION_PACKAGES}
    for name, value in rows.items():
        typer.echo(f"{name:<13} {value or 'not installed'}")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    show_patches: Annotated[
        bool, typer.Option("--patches", help="Show what ktft replaces in other libraries, and whether it is there.")
    ] = False,
) -> None:
    """Check this machine and environment, with a cure for each problem. Exits with 1 if a check fails."""
    from ktft.cli import patches
    from ktft.cli.doctor import examine

    rows: list[Any] = patches.examine() if show_patches else examine()
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    elif show_patches:
        Console().print(patches.table(rows, STYLES))
    else:
        table = Table(box=None, show_header=False)
        for row in rows:
            table.add_row(Text(row.status, style=STYLES[row.status]), row.check, Text(row.value))
            if row.cure:
                table.add_row("", "", Text(f"cure: {row.cure}", style=STYLES[row.status]))
        Console().print(table)
    raise typer.Exit(int(any(row.status == "fail" for row in rows)))


@app.command(context_settings={"ignore_unknown_options": True})
def train(
    file: Annotated[Path, typer.Argument(help="LLaMA-Factory's YAML file.", exists=True, dir_okay=False)],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, over the file's.")] = None,
) -> None:
    """Train: the same as `llamafactory-cli train FILE key=value ...`."""
    if file.suffix not in (".yaml", ".yml"):
        raise refuse(f"{file}: LLaMA-Factory reads .yaml or .yml, not {file.suffix or 'a file without a suffix'}")
    if importlib.util.find_spec("llamafactory") is None:
        raise refuse(f"LLaMA-Factory is not installed: {versions.pip_install('llamafactory')}")
    # LLaMA-Factory finds torchrun on PATH: it must be the one of this environment, activated or not.
    environment = os.environ | {"PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))}
    # -P: a file of the working directory (a torch.py, say) must not shadow a package.
    command = [sys.executable, "-P", "-m", "ktft.cli.launch", "train", str(file), *(overrides or ())]
    sys.stdout.flush()
    os.execve(sys.executable, command, environment)
