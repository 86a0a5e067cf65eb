"""How far packed experts are from the weights they were packed from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ktft.checkpoint.encoded import Encoded
from ktft.native import ExpertLayer

REPORT = "quantization_error.json"


@dataclass(frozen=True)
class ProjectionError:
    """The relative RMS error of one projection in one layer, for all experts together and for the worst one."""

    relative_rms: float
    worst_expert: int
    worst_relative_rms: float


class ErrorMeter:
    """Takes source weights as an `ExpertLayer` does, and compares them with what `layer` holds."""

    def __init__(self, layer: ExpertLayer) -> None:
        self.layer = layer
        self._squares: dict[str, dict[int, tuple[float, float]]] = {name: {} for name in layer.projections}

    format: str

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)

    def load(self, expert: int, projection: str, weight: Tensor, scales: Tensor | None = None, **more: Any) -> bool:
        """Compare one weight; arguments and result are those of `ExpertLayer.load`."""
        source = Encoded(weight, scales, **more).dequantize()
        difference = self.layer.dequantize(expert, projection).sub_(source)
        self._squares[projection][expert] = (_squares(difference), _squares(source))
        return True

    def load_bias(self, expert: int, projection: str, bias: Tensor) -> None:
        """Biases are held in fp32: there is no error."""

    def by_expert(self) -> dict[str, dict[int, float]]:
        """Projection -> expert -> relative RMS error, of the weights compared so far."""
        return {
            name: {expert: _root(error, source) for expert, (error, source) in experts.items()}
            for name, experts in self._squares.items()
        }

    def result(self) -> dict[str, ProjectionError]:
        """Projection -> error over the experts compared so far."""
        errors, by_expert = {}, self.by_expert()
        for name, experts in self._squares.items():
            relative = by_expert[name]
            worst = max(relative, key=lambda expert: (relative[expert], -expert))
            total = _root(sum(e for e, _ in experts.values()), sum(s for _, s in experts.values()))
            errors[name] = ProjectionError(total, worst, relative[worst])
        return errors


def _squares(values: Tensor) -> float:
    norm = values.norm(dtype=values.double().dtype)
    return float(norm) ** 2


def _root(error: float, source: float) -> float:
    """Six digits: more would depend on the order of a sum, and so on threads."""
    if source == 0:
        return 0.0 if error == 0 else math.inf
    return float(f"{math.sqrt(error / source):.6g}")
