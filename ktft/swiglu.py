"""The activation between an expert's gate, up and down projections."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Swiglu:
    """h = g · sigmoid(alpha · g) · (u + shift), g = min(gate, limit), u = up clamped to ±limit.

    The defaults are SiLU(gate) · up (Shazeer 2020, arXiv 2002.05202).
    """

    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0


SILU = Swiglu()
