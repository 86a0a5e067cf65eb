"""A bar for work that is measured in bytes, with rate and time to go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def show(steps: Iterator[tuple[str, int]], total: int, console: Console) -> None:
    """Do the steps, each (what is worked on, bytes that are done with), `total` bytes in all."""
    if not total:
        deque(steps, maxlen=0)
        return
    with progress_bar(total, console) as progress:
        for step, nbytes in steps:
            progress(step, nbytes)


@contextmanager
def progress_bar(total: int, console: Console) -> Iterator[Callable[[str, int], None]]:
    """For work that reports by itself: what to call with (what is worked on, bytes that are done with)."""
    described, bar = TextColumn("{task.description}"), BarColumn()
    with Progress(
        described, bar, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(), console=console
    ) as progress:
        task = progress.add_task("starting", total=total)
        yield lambda step, nbytes: progress.update(task, description=step, advance=nbytes)
