"""A comparison over its limit, and its place in the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One comparison over its limit.

    Attributes:
        check: `contract`, `quantization` or `whole model`.
        layer, expert, projection: the place, as far as it is known.
        quantity: the name of what was compared.
        error, limit: relative errors.
    """

    check: str
    quantity: str
    error: float
    limit: float
    layer: int | None = None
    expert: int | None = None
    projection: str | None = None

    @property
    def text(self) -> str:
        """The problem as one line for a person."""
        names = {"layer": self.layer, "expert": self.expert}
        where = ", ".join(f"{name} {value}" for name, value in names.items() if value is not None) or "whole model"
        return f"{where}: {self.quantity} is {percent(self.error)} off, the limit is {percent(self.limit)}"


def percent(error: float) -> str:
    """The error in percent with three digits."""
    return f"{100 * error:.3g}%" if math.isfinite(error) else str(error)


def finite(value: Any) -> Any:
    """The value with NaN and infinity as strings, because JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
