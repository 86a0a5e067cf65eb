"""`ktft merge`: refusals, progress, the table and the check. torch is imported when the command runs."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ktft.cli.progress import show
from ktft.cli.refusal import refuse
from ktft.config import EXPERT_FORMATS, Settings

if TYPE_CHECKING:
    from ktft.adapters.merge import Merge
    from ktft.adapters.merge_survival import GroupOutcome
    from ktft.verify.merged import MergeCheck

FORMATS = ("same", *EXPERT_FORMATS)
PACKED = ", ".join(name for name in EXPERT_FORMATS if name != "bf16")
SHOWN = 12  # the most rows of the table


def merge(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Directory of the base model, as released.")],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="Directory of the adapter.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write; it must not exist.")],
    storage: Annotated[
        str, typer.Option("--format", help=f"same as BASE; bf16; or packed for ktft: {PACKED}.")
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
    console, target = Console(stderr=True), Path(os.path.abspath(out))
    try:
        settings = Settings(threads=threads, numa_nodes=numa_nodes)
        _check_directories(base, adapter, target, storage)
        from ktft.adapters.merge import PACKED, Merge

        packing = replace(settings, expert_format=storage if storage in PACKED else "bf16")
        with console.status(f"reading headers of {base} ..."):
            merged = Merge(base, adapter, target, storage, packing)
        with merged.opened():
            show(merged.run(), merged.total_bytes(), console)
            groups = merged.outcomes()
            console.print(_table(groups), soft_wrap=True)
            warnings, found = _judge(groups, merged, allow_drowned), None
            if check:
                found = _check(merged, base, adapter, replace(settings, expert_format="bf16"), console)
                if found.drowned:
                    warnings.append(
                        f"rounding moves the logits by {found.error:.2%}, more than the adapter does "
                        f"({found.effect:.2%})"
                    )
            merged.publish(found.to_dict() if found else None)
    except KeyboardInterrupt:
        raise refuse("interrupted; what is finished is kept, run the same command again") from None
    for warning in warnings:
        console.print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    place = shlex.quote(str(out))
    typer.echo(f"{out}: merged. Next:\n  ktft serve {place}\n  ktft chat {place}")


def _check_directories(base: Path, adapter: Path, out: Path, storage: str) -> None:
    if storage not in FORMATS:
        raise ValueError(f"--format is {storage!r}; supported: {', '.join(FORMATS)}")
    if not (base / "config.json").is_file():
        raise ValueError(f"{base} is not a directory with a config.json; download the checkpoint first")
    from ktft.checkpoint.cache import MANIFEST, UNFINISHED

    if any((base / name).is_file() for name in (MANIFEST, UNFINISHED)):
        raise ValueError(f"{base} is a converted checkpoint; give the original one, and --format for a packed result")
    for name, other in (("BASE", base), ("ADAPTER", adapter)):
        one, two = out.resolve(), other.resolve()
        if one == two or one in two.parents or two in one.parents:
            raise ValueError(f"OUT {out} and {name} {other} lie within each other; give a directory apart")
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise ValueError(f"{out} exists; give a new or empty directory, or remove it")


def _judge(groups: list[GroupOutcome], merge: Merge, allow_drowned: bool) -> list[str]:
    """The warnings about projections that rounding changed too much. Raises ValueError if one drowned and may not."""
    from ktft.adapters.merge_survival import DROWNED, WEAK

    weak = [group for group in groups if group.verdict == "weak"]
    drowned = [group for group in groups if group.verdict == "drowned"]
    for worst in drowned[:1]:
        text = (
            f"{len(drowned)} of {len(groups)} merged projections drowned in rounding, the worst is "
            f"{worst.layer} {worst.projection}: {worst.survival.lost:.0%} of what it does is lost, the limit is "
            f"{DROWNED:.0%}"
        )
        if not allow_drowned:
            raise ValueError(
                f"{text}. Merge into a format with more bits (--format bf16), or serve the adapter beside the base "
                f"model. The merged files are in {merge.staging}: the same command with --allow-drowned takes them, "
                "delete them otherwise"
            )
        return [text]
    return [
        f"{len(weak)} of {len(groups)} merged projections are weak, the worst is {worst.layer} {worst.projection}: "
        f"{worst.survival.lost:.0%} of what it does is lost in rounding (above {WEAK:.0%}); a format with more bits "
        "keeps more"
        for worst in weak[:1]
    ]


def _check(merge: Merge, base: Path, adapter: Path, settings: Settings, console: Console) -> MergeCheck:
    """Compare with base and adapter. Raises ValueError if the error is larger than the result's format explains."""
    from ktft.adapters.merge import PACKED
    from ktft.system import available_memory
    from ktft.verify.merged import check_layers, check_logits, layers_bytes, limit_of, logits_bytes

    places = (base, adapter, merge.staging, settings, merge.storage in PACKED)
    if logits_bytes(base) <= available_memory():
        with console.status("comparing logits with those of base and adapter ..."):
            check = check_logits(*places, merge.storage, merge.scheme)
    else:
        found: list[MergeCheck] = []
        limit = limit_of(merge.storage, merge.scheme)
        show(check_layers(*places, limit, found), layers_bytes(base, *places[2:]), console)
        (check,) = found
    effect = f"; the adapter moves them by {check.effect:.2%}" if check.effect is not None else ""
    what = "logits" if check.method == "logits" else f"layer by layer, the worst is {check.where},"
    text = f"{what} are {check.error:.2%} off those of base and adapter, the limit is {check.limit:.2%}{effect}"
    if not check.passed:
        raise ValueError(
            f"the merged model is not the base model with the adapter: {text}. It is left in {merge.staging}; "
            "--no-check takes it all the same"
        )
    console.print(Text(text), soft_wrap=True)
    return check


def _table(groups: list[GroupOutcome]) -> Table:
    title = f"What rounding left of the adapter, the worst {min(SHOWN, len(groups))} of {len(groups)}"
    table = Table("weights of", "lost", "projected", "error", "rounded", "", title=title, box=None)
    styles = {"ok": "green", "weak": "yellow", "drowned": "bold red"}
    for group in groups[:SHOWN]:
        name = f"{group.layer}.{group.projection}".removeprefix("model.")
        table.add_row(
            name if group.weights == 1 else f"{name} x{group.weights}",
            f"{group.survival.lost:.1%}",
            f"{group.survival.projected:.3f}",
            f"{group.survival.relative_error:.3f}",
            group.rounding,
            Text(group.verdict, style=styles[group.verdict]),
        )
    return table
