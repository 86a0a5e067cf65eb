"""What an engine's and transformers' models must agree on, before the experts of one go into the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ktft.native import ExpertLayer


@dataclass(frozen=True)
class RoutedSizes:
    """A layer's routed experts. `clamped_at` is the limit of the activation's arguments; None stands for no limit."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    biases: bool
    clamped_at: float | None

    @classmethod
    def of(cls, layer: ExpertLayer) -> RoutedSizes:
        """Those of ktft's layer, which are those of transformers' model."""
        limit = layer.swiglu.limit
        return cls(
            layer.num_experts,
            layer.hidden_size,
            layer.intermediate_size,
            layer.biases,
            limit if math.isfinite(limit) else None,
        )


def check_agreement(
    engine: str, model: str, found: Mapping[int, RoutedSizes], layers: Mapping[int, ExpertLayer]
) -> None:
    """Compare the routed experts of an engine's model, by layer number, with those of transformers'.

    Raises:
        ValueError: they differ in layers, sizes or activation.
    """
    expected = {number: RoutedSizes.of(layer) for number, layer in layers.items()}
    for number in sorted(found.keys() | expected.keys()):
        if found.get(number) != expected.get(number):
            raise ValueError(
                f"layer {number}: {engine}'s {model} has the routed experts {found.get(number)}, transformers' model "
                f"has {expected.get(number)}; this {engine} cannot serve it with ktft"
            )
