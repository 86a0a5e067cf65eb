"""What `make test` runs on one of its two stacks alone: with the newest libraries it has nothing of its own to show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from ktft.versions import NEWEST, stack

T = TypeVar("T", bound=Callable[..., Any])

SHOWN_BEFORE = [pytest.mark.full] if stack() is NEWEST else []
"""Marks of a test or its parameters that the first stack has in `make test`, and both have in `make test-all`."""


def shown_by_the_first_stack(test: T) -> T:
    """The same for a whole test."""
    for mark in SHOWN_BEFORE:
        test = mark(test)
    return test
