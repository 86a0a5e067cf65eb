"""`ktft verify --serve`: progress, the table and the verdict. torch is imported when the command runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ktft.config import Settings

if TYPE_CHECKING:
    from ktft.verify.server import ParityResult


def require_fitting(url: str | None, own: Mapping[str, Any], others: Mapping[str, Any]) -> None:
    """Refuse options of `own`, which need `--serve`, without its value `url`, and those of `others` with it."""
    wrong = [name for name, value in (own if url is None else others).items() if value is not None]
    if wrong:
        raise ValueError(f"{', '.join(wrong)}: {'only with' if url is None else 'not with'} --serve URL")


def verify(
    url: str,
    name: str | None,
    directory: Path,
    settings: Settings,
    adapter: Path | None,
    prompts: Path | None,
    tokens: int,
    as_json: bool,
) -> int:
    """Compare, and print the findings. Returns the exit code.

    Without `name`, the server's only model is asked for; without `prompts`, built-in texts.
    """
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} is not a directory with a config.json; it must be the model as trained")
    from ktft.verify.client import ServerClient
    from ktft.verify.server import read_prompts, verify_server

    texts = read_prompts(prompts)
    with ServerClient(url, name) as server, Console(stderr=True).status("asking ...") as status:
        for step in verify_server(server, directory, settings, adapter, texts, tokens):
            if isinstance(step, str):
                status.update(f"{step} ...")
            else:
                result = step
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2))
    else:
        _show(url, result)
    for problem in result.problems:
        Console(stderr=True).print(Text(problem, style="red"), soft_wrap=True)
    return int(bool(result.problems))


def _show(url: str, result: ParityResult) -> None:
    console = Console(soft_wrap=True)
    console.print(_table(result))
    for tie in result.ties if not result.problems else ():
        console.print(
            f"near tie: prompt {tie.prompt}, token {tie.position} of the continuation is {tie.served}, training's "
            f"model finds {tie.expected} likelier by {tie.gap:.2g} nats",
            style="yellow",
            highlight=False,
        )
    share = f", {result.applied:.1%} of what it does" if result.applied is not None else ""
    typer.echo(
        f"{url}, {result.model}: {result.verdict}{share} ({result.tokens} tokens of prompts, "
        f"{result.continued} of greedy continuations)"
    )


def _table(result: ParityResult) -> Table:
    what = "base and adapter" if result.base is not None else "the base model"
    rows = [
        (f"server, from {what}", result.served, (result.limit, result.largest_limit)),
        ("server, from the base model alone", result.base, None),
        ("what the adapter does", result.effect, None),
        ("bf16 alone", result.noise, None),
    ]
    table = Table("", "mean", "largest", title="Log-probabilities of given tokens, difference in nats", box=None)
    for name, distance, limits in rows:
        if distance is not None:
            mean, largest = (f" (limit {limit:.3g})" for limit in limits) if limits else ("", "")
            table.add_row(name, f"{distance.mean:.3g}{mean}", f"{distance.largest:.3g}{largest}")
    return table
