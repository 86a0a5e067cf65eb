"""`ktft convert`: refusals, progress and the tables. torch is imported when the command runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from ktft.cli.progress import show
from ktft.config import PROJECTIONS, Settings

if TYPE_CHECKING:
    from ktft.checkpoint.convert import Conversion
    from ktft.checkpoint.quantization_error import ProjectionError


def convert(
    source: Path, target: Path, settings: Settings, *, report: bool, check: bool, console: Console
) -> list[str]:
    """Convert, or with `check` compare an existing conversion. Returns the problems that the comparison found.

    Raises:
        FileNotFoundError, ValueError: the request cannot be done; the message is for the user.
    """
    _check_directories(source, target, must_exist=check)
    from ktft.checkpoint.check import check as compare
    from ktft.checkpoint.check import check_bytes

    with console.status(f"reading headers of {source} ..."):
        conversion = _conversion(source, target, settings)
    problems: list[str] = []
    with conversion.opened(write=not check):
        if check:
            show(compare(conversion, problems), check_bytes(conversion), console)
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
    from ktft.model.outline import outline

    begun = next((target / name for name in (MANIFEST, UNFINISHED) if (target / name).is_file()), None)
    if settings.expert_format is None and begun is not None:
        settings = replace(settings, expert_format=Manifest.read(begun).expert_format)
    plan = outline(source, settings)
    assert isinstance(plan.experts, ExpertPlan)
    return Conversion(plan.experts, plan.layers, plan.model_type, target)


def _error_table(layers: Mapping[int, Mapping[str, ProjectionError]]) -> Table:
    table = Table("layer", *PROJECTIONS, "worst expert", title="Relative RMS error against the source, %", box=None)
    for number, errors in layers.items():
        name = max(errors, key=lambda projection: errors[projection].worst_relative_rms)
        worst = errors[name]
        table.add_row(
            str(number),
            *(f"{100 * errors[projection].relative_rms:.3f}" for projection in PROJECTIONS),
            f"{worst.worst_expert} {name} {100 * worst.worst_relative_rms:.3f}",
        )
    return table
