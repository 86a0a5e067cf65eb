"""`ktft doctor --patches`: the rows of `ktft.hosts` beside what is installed."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields

from rich.table import Table
from rich.text import Text

from ktft.cli.doctor import Status
from ktft.hosts import PATCHES, Patch, installed
from ktft.versions import version_of


@dataclass(frozen=True)
class PatchRow:
    """One patch. `here` says where it stands in this environment, and for a failure what to do."""

    status: Status
    here: str
    name: str
    tested: str
    why: str


def examine() -> list[PatchRow]:
    """All patches. The libraries are imported, and with LLaMA-Factory its rows are installed."""
    return [PatchRow(*_state(each), f"{each.owner}.{each.name}", each.tested_versions, each.why) for each in PATCHES]


def table(rows: list[PatchRow], styles: dict[str, str]) -> Table:
    """The rows for a terminal."""
    found = Table(*(field.name for field in fields(PatchRow)), box=None)
    for row in rows:
        status, *texts = astuple(row)
        found.add_row(Text(status, style=styles[status]), *(Text(text, overflow="fold") for text in texts))
    return found


def _state(patch: Patch) -> tuple[Status, str]:
    if not any(map(version_of, patch.tested)):
        return "ok", f"{patch.package} is not installed"
    if not patch.needed:
        return "ok", f"not needed by {patch.package} {version_of(patch.package)}"
    if "*" in patch.owner:
        return "ok", "in the code of models"
    try:
        patch.find_owner()
    except Exception as error:  # a library's own import can raise anything
        return "fail", str(error)
    if patch in installed():
        return "ok", "installed"
    return "ok", "on single objects" if patch.on_instances else "installed when needed"
