"""`ktft merge`: refusals, progress, the table and the check. torch is imported when the command runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ktft.cli.progress import show
from ktft.config import EXPERT_FORMATS, Settings

if TYPE_CHECKING:
    from ktft.adapters.merge import Merge
    from ktft.adapters.merge_survival import GroupOutcome
    from ktft.verify.merged import MergeCheck

FORMATS = ("same", *EXPERT_FORMATS)
SHOWN = 12  # the most rows of the table


@dataclass(frozen=True)
class Request:
    """The user's options."""

    base: Path
    adapter: Path
    out: Path
    storage: str
    settings: Settings
    check: bool
    allow_drowned: bool


def merge(request: Request, console: Console) -> list[str]:
    """Merge, with progress on `console`. Returns warnings.

    Raises:
        FileNotFoundError, ValueError: the merge failed and OUT was not created; the message is for the user.
    """
    _check_directories(request)
    from dataclasses import replace

    from ktft.adapters.merge import PACKED, Merge

    storage = request.storage
    settings = replace(request.settings, expert_format=storage if storage in PACKED else "bf16")
    with console.status(f"reading headers of {request.base} ..."):
        merge = Merge(request.base, request.adapter, request.out, storage, settings)
    with merge.opened():
        show(merge.run(), merge.total_bytes(), console)
        groups = merge.outcomes()
        console.print(_table(groups), soft_wrap=True)
        warnings = _judge(groups, merge, request.allow_drowned)
        check = _check(merge, request, console) if request.check else None
        if check is not None and check.drowned:
            warnings.append(
                f"rounding moves the logits by {check.error:.2%}, more than the adapter does ({check.effect:.2%})"
            )
        merge.publish(None if check is None else check.to_dict())
    return warnings


def _check_directories(request: Request) -> None:
    base, adapter, out = request.base, request.adapter, request.out
    if request.storage not in FORMATS:
        raise ValueError(f"--format is {request.storage!r}; supported: {', '.join(FORMATS)}")
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
    """The warnings about projections that rounding changed too much.

    Raises:
        ValueError: a projection drowned, and that is not allowed.
    """
    from ktft.adapters.merge_survival import DROWNED, WEAK

    found = {verdict: [group for group in groups if group.verdict == verdict] for verdict in ("weak", "drowned")}
    for group in found["drowned"][:1]:
        text = (
            f"{len(found['drowned'])} of {len(groups)} merged projections drowned in rounding, the worst is "
            f"{group.layer} {group.projection}: {group.survival.lost:.0%} of what it does is lost, the limit is "
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
        f"{len(found['weak'])} of {len(groups)} merged projections are weak, the worst is {group.layer} "
        f"{group.projection}: {group.survival.lost:.0%} of what it does is lost in rounding (above {WEAK:.0%}); "
        "a format with more bits keeps more"
        for group in found["weak"][:1]
    ]


def _check(merge: Merge, request: Request, console: Console) -> MergeCheck:
    """Compare the result with base and adapter.

    Raises:
        ValueError: the error is larger than the result's format explains.
    """
    from dataclasses import replace

    from ktft.adapters.merge import PACKED
    from ktft.system import available_memory
    from ktft.verify.merged import check_layers, check_logits, layers_bytes, limit_of, logits_bytes

    settings, packed = replace(request.settings, expert_format="bf16"), request.storage in PACKED
    places = (request.base, request.adapter, merge.staging, settings, packed)
    if logits_bytes(request.base) <= available_memory():
        with console.status("comparing logits with those of base and adapter ..."):
            check = check_logits(*places, request.storage, merge.scheme)
    else:
        found: list[MergeCheck] = []
        limit = limit_of(request.storage, merge.scheme)
        show(check_layers(*places, limit, found), layers_bytes(request.base, *places[2:]), console)
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
