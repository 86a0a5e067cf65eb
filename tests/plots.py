"""Plots in training reports, which take longer to draw than a tiny model takes to train.

Runs in a test's own process leave them out unless the test asks for them, and so do its forks and the processes of
`rank_program.py`. Commands in processes of their own always draw them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

if importlib.util.find_spec("matplotlib"):  # in the environment of serving, no test trains
    from ktft.train import run_report_page

    _DRAWN_BY = {name: getattr(run_report_page, name) for name in ("Figure", "_svg")}


class _Nothing:
    """A figure, its axes and all that they are asked for. It draws nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __call__(self, *_: Any, **__: Any) -> _Nothing:
        return self

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(([], []))  # a legend's handles and labels


def _empty(figure: Any, salt: str) -> str:
    return "<svg></svg>"


_LEFT_OUT = {"Figure": _Nothing, "_svg": _empty}


def leave_out() -> None:
    """Let all reports of this process have an empty picture in place of each plot."""
    if importlib.util.find_spec("matplotlib"):
        for name, value in _LEFT_OUT.items():
            setattr(run_report_page, name, value)


@contextmanager
def without_plots() -> Iterator[None]:
    """Reports have an empty picture in place of each plot."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("matplotlib"):
            for name, value in _LEFT_OUT.items():
                patch.setattr(run_report_page, name, value)
        yield


@contextmanager
def with_plots() -> Iterator[None]:
    """Reports have their plots, as for users."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _DRAWN_BY.items():
            patch.setattr(run_report_page, name, value)
        yield
