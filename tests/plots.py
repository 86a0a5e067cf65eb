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

    _DRAW = run_report_page._svg


def _empty(figure: Any, salt: str) -> str:
    return "<svg></svg>"


def leave_out() -> None:
    """Let all reports of this process have an empty picture in place of each plot."""
    if importlib.util.find_spec("matplotlib"):
        run_report_page._svg = _empty


@contextmanager
def without_plots() -> Iterator[None]:
    """Reports have an empty picture in place of each plot."""
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("matplotlib"):
            patch.setattr(run_report_page, "_svg", _empty)
        yield


@contextmanager
def with_plots() -> Iterator[None]:
    """Reports have their plots, as for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_report_page, "_svg", _DRAW)
        yield
