"""What transformers collects from a model's layers beside their outputs, such as router logits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from transformers.utils import output_capturing

_collector: Any = getattr(output_capturing, "_active_collector", None)
KNOWN = _collector is not None
"""Whether this version of transformers collects it in lists that are found here."""


def lists() -> dict[Any, list[Any]]:
    """The lists that layers add to now, by what they collect."""
    found: dict[Any, list[Any]] = (_collector.get() if KNOWN else None) or {}
    return found


@contextlib.contextmanager
def into(others: dict[Any, list[Any]]) -> Iterator[dict[Any, list[Any]]]:
    """A block in which layers add to these lists."""
    token = _collector.set(others)
    try:
        yield others
    finally:
        _collector.reset(token)
