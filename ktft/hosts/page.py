"""The tables of docs/reference/hosts.md, made from the rows: `python -m ktft.hosts.page FILE` writes them."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from ktft.hosts import PATCHES, Patch

MARK = "<!-- The tables are made from ktft/hosts by `python -m ktft.hosts.page docs/reference/hosts.md`. -->\n"
"""The line of the page after which everything is made from the rows."""


def page(text: str) -> str:
    """A page with the tables of today. Raises ValueError if it has no `MARK`."""
    if MARK not in text:
        raise ValueError(f"the page has no line {MARK!r}; put it where the tables begin")
    return text.partition(MARK)[0] + MARK + tables()


def tables() -> str:
    """One table for each library."""
    lines = []
    for package, rows in groupby(PATCHES, lambda patch: patch.package):
        table = [*rows]
        lines += ["", f"## {package}", f"Tested with {tested(table[0])}.", ""]
        lines += ["| Name | Replaced by | Where | Why |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(_cells(patch))} |" for patch in table]
    return "\n".join(lines) + "\n"


def tested(patch: Patch) -> str:
    """The versions that a row was tested with."""
    return ", ".join(f"{name} {low} to below {high}" for name, (low, high) in patch.tested.items())


def _cells(patch: Patch) -> tuple[str, ...]:
    where = "single objects" if patch.on_instances else "process"
    return f"`{patch.owner.partition('.')[2]}.{patch.name}`", f"`{patch.wrapper}`", where, patch.why


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(page(file.read_text()))
