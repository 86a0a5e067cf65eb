"""The activation between an expert's gate, up and down projections, or between up and down alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ktft.config import PROJECTIONS


@dataclass(frozen=True)
class Swiglu:
    """h = g · sigmoid(alpha · g + cubic · g³) · (u + shift), g = min(gate, gate_limit), u = up clamped to ±limit.

    The defaults are SiLU(gate) · up (Shazeer 2020, arXiv 2002.05202). `gate_limit` is `limit` by default. Experts that
    are not `gated` have h = max(up, 0)² (So et al. 2021, arXiv 2109.08668), and no matrix for a gate.
    """

    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0
    cubic: float = 0.0
    gate_limit: float | None = None
    gated: bool = True

    @property
    def gate_most(self) -> float:
        """What the gate is clamped at."""
        return self.limit if self.gate_limit is None else self.gate_limit

    @property
    def projections(self) -> tuple[str, ...]:
        """Those of `PROJECTIONS` that an expert has."""
        return projections(self.gated)


def projections(gated: bool) -> tuple[str, ...]:
    """Those of `PROJECTIONS` that experts with or without a gate have."""
    return PROJECTIONS if gated else PROJECTIONS[1:]


SILU = Swiglu()
RELU2 = Swiglu(gated=False)
_SLOPE = 2 * math.sqrt(2 / math.pi)
GELU_TANH = Swiglu(alpha=_SLOPE, cubic=_SLOPE * 0.044715)
"""GELU(gate) · up with GELU's approximation by tanh (Hendrycks and Gimpel 2016, arXiv 1606.08415): (1 + tanh(x)) / 2 is
sigmoid(2 x)."""


def clamped_after(limit: float) -> Swiglu:
    """min(SiLU(gate), limit) · up, with up clamped to ±limit. SiLU is above a positive limit exactly where the gate is
    above one point.
    """
    if math.isinf(limit):
        return SILU
    gate = limit
    while True:
        sigmoid = 1 / (1 + math.exp(-gate))
        step = (gate * sigmoid - limit) / (sigmoid + gate * sigmoid * (1 - sigmoid))
        gate -= step
        if abs(step) <= 1e-12 * gate:
            return Swiglu(limit=limit, gate_limit=gate)
