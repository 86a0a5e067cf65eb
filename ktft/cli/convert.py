"""`ktft convert`: refusals, progress and the tables. torch is imported when the command runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ktft.cli.progress import show
from ktft.cli.refusal import refuse
from ktft.config import DEFAULT_EXPERT_FORMAT, EXPERT_FORMATS, PROJECTIONS, Settings

if TYPE_CHECKING:
    from ktft.checkpoint.convert import Conversion
    from ktft.checkpoint.quantization_error import ProjectionError


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Directory of a checkpoint as released.")],
    target: Annotated[
        Path, typer.Argument(metavar="DST", help="Directory to write: a new one, or one that an interrupted run began.")
    ],
    expert_format: Annotated[
        str | None, typer.Option("--format", help=f"{', '.join(EXPERT_FORMATS)}. [{DEFAULT_EXPERT_FORMAT}]")
    ] = None,
    expert_checkpoint: Annotated[
        Path | None, typer.Option(help="Where the experts are, if not in SRC: a GGUF file or another directory.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. [one per physical core]")] = None,
    numa_nodes: Annotated[int | None, typer.Option(min=1, help="NUMA nodes to work on. [all]")] = None,
    report: Annotated[bool, typer.Option("--report", help="Measure the quantization error of every layer.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Read SRC and DST again and compare all checksums.")] = False,
) -> None:
    """Pack a checkpoint's experts once, into a directory that trains and serves like SRC and loads in seconds.

    Run it again after an interruption: it goes on where it stopped.
    """
    console = Console(stderr=True)
    try:
        settings = Settings(
            expert_format=expert_format,
            expert_checkpoint=str(expert_checkpoint) if expert_checkpoint else None,
            threads=threads,
            numa_nodes=numa_nodes,
        )
        problems = _convert(source, target, settings, report, check, console)
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


def _convert(source: Path, target: Path, settings: Settings, report: bool, check: bool, console: Console) -> list[str]:
    """Convert, or with `check` compare an existing conversion. Returns the problems that the comparison found."""
    _check_directories(source, target, must_exist=check)
    from ktft.checkpoint import convert

    with console.status(f"reading headers of {source} ..."):
        conversion = _conversion(source, target, settings)
    problems: list[str] = []
    with conversion.opened(write=not check):
        if check:
            show(convert.check(conversion, problems), convert.check_bytes(conversion), console)
        else:
            show(conversion.run(report), conversion.source_bytes(report), console)
            if report:
                console.print(_error_table(conversion.report()))
    return problems


def _check_directories(source: Path, target: Path, must_exist: bool) -> None:
    from ktft.checkpoint.cache import MANIFEST, UNFINISHED

    if not (source / "config.json").is_file():
        raise ValueError(f"{source} is not a directory with a config.json; download the checkpoint first")
    for name in (MANIFEST, UNFINISHED):
        if (source / name).is_file():
            raise ValueError(f"{source} is a conversion itself ({name} is in it); give the original checkpoint")
    one, other = source.resolve(), target.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise ValueError(f"source {source} and target {target} lie within each other; give a directory apart")
    if must_exist and not (target / MANIFEST).is_file():
        raise ValueError(f"{target} holds no finished conversion ({MANIFEST} is not there); run without --check first")


def _conversion(source: Path, target: Path, settings: Settings) -> Conversion:
    from dataclasses import replace

    from ktft.checkpoint.cache import MANIFEST, UNFINISHED, Manifest
    from ktft.checkpoint.convert import Conversion
    from ktft.checkpoint.load import ExpertPlan
    from ktft.model.load_plan import outline

    begun = next((target / name for name in (MANIFEST, UNFINISHED) if (target / name).is_file()), None)
    if settings.expert_format is None and begun is not None:
        settings = replace(settings, expert_format=Manifest.read(begun).expert_format)
    plan = outline(source, settings)
    if not isinstance(plan.experts, ExpertPlan):
        raise ValueError(f"{settings.expert_checkpoint} is a conversion itself; give the experts as they were released")
    if settings.expert_checkpoint is None:
        return Conversion(plan.experts, plan.layers, plan.model_type, target)
    rest, replaced = plan.checkpoint, plan.replaced()
    return Conversion(plan.experts, plan.layers, plan.model_type, target, rest=rest, replaced=replaced)


def _error_table(layers: Mapping[int, Mapping[str, ProjectionError]]) -> Table:
    projections = next(iter(layers.values()), PROJECTIONS)
    table = Table("layer", *projections, "worst expert", title="Relative RMS error against the source, %", box=None)
    for number, errors in layers.items():
        name = max(errors, key=lambda projection: errors[projection].worst_relative_rms)
        worst = errors[name]
        table.add_row(
            str(number),
            *(f"{100 * errors[projection].relative_rms:.3f}" for projection in projections),
            f"{worst.worst_expert} {name} {100 * worst.worst_relative_rms:.3f}",
        )
    return table
