"""`ktft verify --dense-format`: progress, the tables and the verdict. torch is imported when the command runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ktft.config import DENSE_FORMATS, Settings
from ktft.formats import FORMAT_TRAITS
from ktft.system import readable
from ktft.verify.problem import finite, percent

if TYPE_CHECKING:
    from ktft.verify.dense import DenseEffect

ALL = "all"


def require_fitting(dense_format: str | None, others: Mapping[str, Any]) -> None:
    """Refuse options of `others` beside `--dense-format`."""
    wrong = [name for name, value in others.items() if value is not None]
    if dense_format is not None and wrong:
        raise ValueError(f"{', '.join(wrong)}: not with --dense-format")


def verify(
    dense_format: str,
    directory: Path,
    settings: Settings,
    tokens: int,
    prompts: Path | None,
    adapter: Path | None,
    as_json: bool,
) -> int:
    """Compare, and print the findings. Returns the exit code.

    `dense_format` is what the user gave: names with commas, or `all`.
    """
    formats = formats_of(dense_format)
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} is not a directory with a config.json; download the checkpoint first")
    from ktft.verify.dense import verify_dense

    found: list[DenseEffect] = []
    with Console(stderr=True).status("dense weights ...") as status:
        for step in verify_dense(directory, settings, formats, tokens, prompts, adapter):
            if isinstance(step, str):
                status.update(f"{step} ...")
            else:
                found.append(step)
    problems = [problem for each in found for problem in each.problems]
    if as_json:
        lines = [asdict(problem) | {"text": problem.text} for problem in problems]
        typer.echo(
            json.dumps(finite({"passed": not problems, "problems": lines, "formats": [*map(asdict, found)]}), indent=2)
        )
    else:
        console = Console(soft_wrap=True)
        console.print(_weight_table(found))
        console.print(_model_table(found))
    for problem in problems:
        Console(stderr=True).print(Text(problem.text, style="red"), soft_wrap=True)
    if not as_json:
        verdict = f"off, {len(problems)} over the limit" if problems else "pass"
        typer.echo(f"{directory} with dense weights in {', '.join(formats)}: {verdict}")
    return int(bool(problems))


def formats_of(given: str) -> list[str]:
    """The formats that a user named, each once.

    Raises:
        ValueError: a name is unknown.
    """
    names = [name.strip() for name in given.split(",")]
    for name in names:
        if name not in (*DENSE_FORMATS, ALL):
            raise ValueError(f"--dense-format has {name!r}; supported: {', '.join(DENSE_FORMATS)}, or {ALL}")
    return list(DENSE_FORMATS) if ALL in names else list(dict.fromkeys(names))


def _weight_table(found: Sequence[DenseEffect]) -> Table:
    table = Table(
        "",
        "weights",
        *(f"{each.format}\n(limit {percent(FORMAT_TRAITS[each.format].error_limit)})" for each in found),
        title="Relative errors of the weights of each group, and of the worst one",
        box=None,
    )
    for group, first in found[0].groups.items():
        cells = (each.groups[group] for each in found)
        table.add_row(
            group,
            str(first.weights),
            *(f"{percent(e.relative_rms)}\n{percent(e.worst_relative_rms)} {e.worst}" for e in cells),
        )
    return table


def _model_table(found: Sequence[DenseEffect]) -> Table:
    plain = sum(group.plain_bytes for group in found[0].groups.values())
    table = Table(
        "", "memory", "logits", "gradient", "KL, nats", "same top", "packed against decoded",
        title=f"The whole model, against the one whose dense weights have its own dtype ({readable(plain)})",
        box=None,
    )  # fmt: skip
    for each in found:
        table.add_row(
            each.format,
            readable(each.bytes),
            percent(each.effect.logits),
            percent(each.effect.gradient),
            f"{each.effect.kl:.3g}",
            percent(each.effect.top1),
            f"{percent(max(each.contract.logits, each.contract.gradient))}",
        )
    return table
