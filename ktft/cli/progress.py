"""A bar for work that is measured in bytes, with rate and time to go."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def show(steps: Iterator[tuple[str, int]], total: int, console: Console) -> None:
    """Do the steps, each (what is worked on, bytes that are done with), `total` bytes in all."""
    if not total:
        deque(steps, maxlen=0)
        return
    described, bar = TextColumn("{task.description}"), BarColumn()
    with Progress(
        described, bar, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        task = progress.add_task("starting", total=total)
        for step, nbytes in steps:
            progress.update(task, description=step, advance=nbytes)
