"""The quantization errors of one layer's weights, and the experts whose error their format does not explain."""

from __future__ import annotations

import statistics
from typing import Any

from ktft.checkpoint.quantization_error import ErrorMeter
from ktft.formats import FORMAT_TRAITS
from ktft.native import ExpertLayer
from ktft.verify.contract import comparable
from ktft.verify.problem import Problem

FAR_FROM_OTHERS = 3.0
"""An expert is off, even within its format's limit, if its error is this many times the median of its layer."""


class PackingMeter(ErrorMeter):
    """Packs each weight into `layer` and compares it at once, so that a source is read once."""

    def load(self, expert: int, projection: str, weight: Any, scales: Any = None, **more: Any) -> bool:
        """Pack and compare one weight; see `ExpertLayer.load`."""
        kept = self.layer.load(expert, projection, weight, scales, **more)
        super().load(expert, projection, weight, scales, **more)
        return kept

    def load_bias(self, expert: int, projection: str, bias: Any) -> None:
        """Load one bias; see `ExpertLayer.load_bias`."""
        self.layer.load_bias(expert, projection, bias)


def outliers(meter: ErrorMeter, layer: ExpertLayer, number: int) -> list[Problem]:
    """The experts of layer `number` whose error their format does not explain, the worst first."""
    found, traits = [], FORMAT_TRAITS[layer.format]
    for projection, errors in meter.by_expert().items():
        far = max(FAR_FROM_OTHERS * statistics.median(errors.values()), traits.error)
        limit = min(far, traits.error_limit)
        found += [
            Problem("quantization", f"{projection} against its source", error, limit, number, expert, projection)
            for expert, error in errors.items()
            if not error <= limit
        ]
    return sorted(found, key=lambda problem: -comparable(problem.error))
