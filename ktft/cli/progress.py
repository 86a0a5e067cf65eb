"""A progress bar for work measured in bytes, with rate and remaining time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

TAIL = 32


def show(steps: Iterator[tuple[str, int]], total: int, console: Console) -> None:
    """Run the steps with a bar. Each step is (what is worked on, bytes finished); `total` is the sum of bytes."""
    if not total:
        deque(steps, maxlen=0)
        return
    with progress_bar(total, console) as progress:
        for step, nbytes in steps:
            progress(step, nbytes)


@contextmanager
def progress_bar(total: int, console: Console) -> Iterator[Callable[[str, int], None]]:
    """A bar for work that reports by itself. Yields a function to call with (what is worked on, bytes finished)."""
    with _bar(console) as progress:
        task = progress.add_task("starting", total=total)
        yield lambda step, nbytes: progress.update(task, description=step, advance=nbytes)


class Phases:
    """A bar for another process's work in phases. If the output is not a terminal, each phase is one line instead."""

    def __init__(self, console: Console) -> None:
        self._console, self._phase = console, ""
        self._bar: Progress | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show the progress of a phase in bytes; 0 of 0 means that there are none to count."""
        new, self._phase = phase != self._phase, phase
        if not self._console.is_terminal:
            if new:
                self._console.print(f"{phase} ...", highlight=False, soft_wrap=True)
            return
        if self._bar is None or new:
            self.end()
            self._bar = _bar(self._console)
            self._bar.add_task(phase, total=total or None)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=done, total=total or None)

    def end(self) -> None:
        """Stop the bar and leave it on the screen."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _bar(console: Console) -> Progress:
    """A bar for 80 columns and more. Long names lose their beginning, and figures stay on one line."""
    columns = (
        _Tail(table_column=Column(no_wrap=True)),
        BarColumn(None, table_column=Column(ratio=1)),
        DownloadColumn(table_column=Column(no_wrap=True)),
        TransferSpeedColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    )
    return Progress(*columns, console=console, expand=True)


class _Tail(ProgressColumn):
    """The name of the current work. A long name is cut to its end, which tells it from others."""

    def render(self, task: Task) -> Text:
        """The name in at most `TAIL` characters."""
        name = task.description
        return Text(name if len(name) <= TAIL else f"…{name[1 - TAIL :]}")
