"""What quantizing did to one layer's weights, and which expert is further from its source than its format explains."""

from __future__ import annotations

import statistics
from typing import Any

from ktft.checkpoint.quantization_error import ErrorMeter
from ktft.native import ExpertLayer
from ktft.verify.contract import comparable
from ktft.verify.problem import Problem

TYPICAL = {"bf16": 0.0017, "int8": 0.0083, "fp8": 0.0264, "k4": 0.0767, "int4": 0.0822, "mxfp4": 0.115}
"""Relative RMS error of Gaussian weights: docs/reference/formats.md."""

LIMITS = {"bf16": 0.005, "int8": 0.04, "fp8": 0.04, "k4": 0.14, "int4": 0.16, "mxfp4": 0.19}
"""No expert's projection may be further off: half again what heavy-tailed weights (Student t5) have, and more where a
format has one scale a row."""

FAR_FROM_OTHERS = 3.0
"""Times the median of the layer's experts, of an expert that is off although within its format's limit."""


class PackingMeter(ErrorMeter):
    """Packs each weight into `layer` and compares it at once, so that a source is read once."""

    def load(self, expert: int, projection: str, weight: Any, scales: Any = None, **more: Any) -> bool:
        """As `ExpertLayer.load`."""
        kept = self.layer.load(expert, projection, weight, scales, **more)
        super().load(expert, projection, weight, scales, **more)
        return kept

    def load_bias(self, expert: int, projection: str, bias: Any) -> None:
        """As `ExpertLayer.load_bias`."""
        self.layer.load_bias(expert, projection, bias)


def outliers(meter: ErrorMeter, layer: ExpertLayer, number: int) -> list[Problem]:
    """Experts of layer `number` that are further off than their format explains, the worst first."""
    found = []
    for projection, errors in meter.by_expert().items():
        far = max(FAR_FROM_OTHERS * statistics.median(errors.values()), TYPICAL[layer.format])
        limit = min(far, LIMITS[layer.format])
        found += [
            Problem("quantization", f"{projection} against its source", error, limit, number, expert, projection)
            for expert, error in errors.items()
            if not error <= limit
        ]
    return sorted(found, key=lambda problem: -comparable(problem.error))
