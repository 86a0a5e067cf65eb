"""The `ktft` command. Nothing here imports torch before a command needs it, so `ktft --help` is quick."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shlex
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from ktft import config, versions
from ktft.cli import bench
from ktft.cli.chat import chat
from ktft.cli.export import export
from ktft.cli.plan import plan
from ktft.cli.refusal import refuse
from ktft.cli.serve import serve

ORDER = ("doctor", "plan", "train", "convert", "verify", "merge", "export", "serve", "chat", "bench", "version")
"""The commands as a newcomer needs them."""

_PACKED = ", ".join(name for name in config.EXPERT_FORMATS if name != "bf16")


class Commands(TyperGroup):
    """All commands. An error that is for the user ends any of them with its message alone."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In `ORDER`."""
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Exit status 2 for what the user can mend."""
        try:
            return super().invoke(ctx)
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
app.command()(plan)
app.command()(export)
app.command()(serve)
app.command()(chat)

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}
VERIFY_TOKENS, SERVE_TOKENS = 64, 16
VERSION_PACKAGES = ("torch", "transformers", "peft", "accelerate", "llamafactory")


def installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def isa() -> str:
    try:
        from ktft import native

        return native.default_isa()
    except Exception as error:
        return f"none: {error}"


@app.command()
def version() -> None:
    """Show the versions of ktft and of what it works with, and the instruction set it uses here."""
    rows = {"ktft": installed("ktft"), "isa": isa(), "python": platform.python_version()}
    rows |= {package: installed(package) for package in VERSION_PACKAGES}
    for name, value in rows.items():
        typer.echo(f"{name:<13} {value}")


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


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Directory of a checkpoint as released.")],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="Directory to write: a new one, or one that an interrupted run began.")
    ],
    expert_format: Annotated[
        str | None,
        typer.Option("--format", help=f"{', '.join(config.EXPERT_FORMATS)}. [{config.DEFAULT_EXPERT_FORMAT}]"),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. [one per physical core]")] = None,
    numa_nodes: Annotated[int | None, typer.Option(min=1, help="NUMA nodes to work on. [all]")] = None,
    report: Annotated[bool, typer.Option("--report", help="Measure the quantization error of every layer.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Read SRC and DST again and compare all checksums.")] = False,
) -> None:
    """Pack a checkpoint's experts once, into a directory that trains and serves like SRC and loads in seconds.

    Run it again after an interruption: it goes on where it stopped.
    """
    from ktft.cli import convert as command

    console = Console(stderr=True)
    try:
        settings = config.Settings(expert_format=expert_format, threads=threads, numa_nodes=numa_nodes)
        problems = command.convert(source, target, settings, report=report, check=check, console=console)
    except KeyboardInterrupt:
        raise refuse(f"interrupted; what is finished in {target} is kept, run the same command again") from None
    for problem in problems:
        console.print(Text(problem, style="red"), soft_wrap=True)
    if problems:
        raise refuse(
            f"{len(problems)} problems. Delete damaged files and run ktft convert {source} {target} again, which makes "
            "what is missing; where the source has changed, convert it into another directory"
        )
    if check:
        typer.echo(f"{target}: all checksums match")
        return
    place = shlex.quote(str(target))
    typer.echo(
        f"{target}: converted. Next:\n"
        f"  ktft verify {place}    compares it with {source}\n"
        f"  ktft train FILE.yaml model_name_or_path={place}\n"
        f"  ktft serve {place}"
    )


@app.command()
def verify(
    model: Annotated[Path, typer.Argument(help="Directory of a checkpoint, as released or converted.")],
    expert_format: Annotated[
        str | None,
        typer.Option("--format", help=f"{', '.join(config.EXPERT_FORMATS)}. [{config.DEFAULT_EXPERT_FORMAT}]"),
    ] = None,
    isa: Annotated[str | None, typer.Option(help="Kernels' instruction set. [best of this CPU]")] = None,
    numa_nodes: Annotated[int | None, typer.Option(min=1, help="NUMA nodes to split experts over. [all]")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. [one per physical core]")] = None,
    layers: Annotated[str | None, typer.Option(help="Numbers of the layers to verify, as in 3,7. [all]")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens that go through; of each continuation with --serve. [64; 16]")
    ] = None,
    adapter: Annotated[
        Path | None, typer.Option(help="Directory of an adapter. [random LoRA; none with --serve]")
    ] = None,
    source: Annotated[Path | None, typer.Option(help="What MODEL was converted from. [where it was then]")] = None,
    whole: Annotated[
        bool | None, typer.Option("--whole/--layers-only", help="The whole model too. [if it fits in memory]")
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="URL", help="Compare the server there with training's model instead.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The server's name for MODEL. [its only one]")] = None,
    deferral: Annotated[
        int | None, typer.Option(min=1, help="Report what deferring so many experts a token changes, nothing else.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Text for --serve or --deferral, a prompt a line. [short texts, random tokens]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Compare a model's logits and gradients with a reference; say pass, or which layer and expert is off.

    With --serve: compare log-probabilities and greedy continuations of a server with those of training's model, MODEL
    alone or with --adapter; say whether the server applies it. Exits with 0 on a pass, 1 if something is off, 2 on bad
    input.
    """
    from ktft.cli import verify as command
    from ktft.cli import verify_server

    settings = config.Settings(expert_format=expert_format, threads=threads, numa_nodes=numa_nodes, isa=isa)
    verify_server.require_fitting(
        serve, {"--served-model-name": served_model_name, "--prompts": prompts if deferral is None else None},
        {"--layers": layers, "--source": source, "--whole": whole, "--deferral": deferral},
    )  # fmt: skip
    if serve is not None:
        asked = verify_server.Request(
            serve, served_model_name, model, settings, adapter, prompts, tokens or SERVE_TOKENS
        )
        raise typer.Exit(verify_server.verify(asked, as_json))
    if deferral is not None:
        command.show_deferral(model, settings, deferral, tokens or VERIFY_TOKENS, prompts, adapter, as_json)
        return
    numbers = command.parse_layers(layers)
    request = command.Request(model, settings, numbers, tokens or VERIFY_TOKENS, adapter, source, whole)
    report = command.verify(request, Console(stderr=True))
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        console = Console(soft_wrap=True)
        for part in command.tables(report):
            console.print(part)
    for problem in report.problems:
        Console(stderr=True).print(Text(problem.text, style="red"), soft_wrap=True)
    if not as_json:
        verdict = f"off, {len(report.problems)} over the limit" if report.problems else "pass"
        typer.echo(f"{model} in {report.format}, {report.isa}, {report.numa_nodes} NUMA nodes: {verdict}")
    raise typer.Exit(int(bool(report.problems)))


@app.command()
def merge(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Directory of the base model, as released.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Directory of the adapter.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; it must not exist.")],
    storage: Annotated[
        str, typer.Option("--format", help=f"same as BASE; bf16; or packed for ktft: {_PACKED}.")
    ] = "same",
    check: Annotated[bool, typer.Option("--check/--no-check", help="Compare logits with base and adapter.")] = True,
    allow_drowned: Annotated[
        bool,
        typer.Option(
            "--allow-drowned", help="Write the result even if rounding removed most of what the adapter does."
        ),
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. [one per physical core]")] = None,
    numa_nodes: Annotated[int | None, typer.Option(min=1, help="NUMA nodes to work on. [all]")] = None,
) -> None:
    """Add an adapter to its base model's weights, and write the sum as a checkpoint of its own.

    Run it again after an interruption: it goes on where it stopped. Exits with 2 if there is no OUT.
    """
    from ktft.cli import merge as command

    console = Console(stderr=True)
    try:
        settings = config.Settings(threads=threads, numa_nodes=numa_nodes)
        request = command.Request(base, adapter, Path(os.path.abspath(out)), storage, settings, check, allow_drowned)
        warnings = command.merge(request, console)
    except KeyboardInterrupt:
        raise refuse("interrupted; what is finished is kept, run the same command again") from None
    for warning in warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    place = shlex.quote(str(out))
    served = f"  ktft serve {place}\n  ktft chat {place}"
    typer.echo(f"{out}: merged. Next:\n{served}")


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
