"""How much of a delta is left once the sum is rounded to what a checkpoint can store."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

WEAK, DROWNED = 0.3, 0.7
"""Limits of `Survival.lost`. docs/guide/merge.md has the measurements behind them."""


@dataclass(frozen=True)
class Survival:
    """Sums over the elements of one weight or of several weights.

    `moved` is the stored merged weight minus the stored base weight. It should equal the delta; the error is the
    difference between the two.

    Attributes:
        delta, moved, error: sums of squares.
        product: the sum of the products of delta and moved.
        read: the sum of squares of the error's product with an orthonormal basis of the rows of lora_A, which is its
            effect on the inputs that the adapter reads.
    """

    delta: float = 0.0
    moved: float = 0.0
    error: float = 0.0
    product: float = 0.0
    read: float = 0.0

    @classmethod
    def measure(cls, delta: Tensor, moved: Tensor, inputs: Tensor | None) -> Survival:
        """Measure one weight. `delta` and `moved` have one shape; `inputs` is what `LoraDelta.inputs` returns."""
        error = moved - delta
        read = error if inputs is None else error @ inputs
        return cls(_dot(delta, delta), _dot(moved, moved), _dot(error, error), _dot(moved, delta), _dot(read, read))

    @classmethod
    def total(cls, parts: Iterable[Survival]) -> Survival:
        """The sums over several weights together."""
        found = [asdict(part) for part in parts]
        return cls(**{name: math.fsum(part[name] for part in found) for name in asdict(cls())})

    @property
    def cosine(self) -> float:
        """The cosine between moved and the delta."""
        return _ratio(self.product, math.sqrt(self.delta * self.moved))

    @property
    def projected(self) -> float:
        """<moved, delta> / <delta, delta>: 1 if the delta is there, whatever noise came with it, and 0 if it is not."""
        return _ratio(self.product, self.delta)

    @property
    def relative_error(self) -> float:
        """|moved - delta| / |delta|."""
        return math.sqrt(_ratio(self.error, self.delta))

    @property
    def lost(self) -> float:
        """The relative error on the inputs that the adapter reads: 0 if it acts as trained, 1 if all of it is wrong.

        Rounding noise does not depend on these directions, so with rank r and n inputs this is sqrt(r / n) times
        `relative_error`.
        """
        return math.sqrt(_ratio(self.read, self.delta))

    def to_dict(self) -> dict[str, float]:
        """The four measures, for the report."""
        names = ("lost", "projected", "cosine", "relative_error")
        return {name: _digits(getattr(self, name)) for name in names}


@dataclass(frozen=True)
class Outcome:
    """One merged weight."""

    name: str  # the module's, or the tensor's if the adapter replaces it
    group: tuple[str, str]  # the layer and projection; weights are judged by group
    rounding: str  # `nearest` or `dithered`
    survival: Survival

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Outcome:
        """Read what `asdict` returned. Raises KeyError or TypeError for anything else."""
        group = (values["group"][0], values["group"][1])
        return cls(values["name"], group, values["rounding"], Survival(**values["survival"]))


@dataclass(frozen=True)
class GroupOutcome:
    """The weights of one projection in one layer: a single weight, or the weights of all experts."""

    layer: str
    projection: str
    weights: int
    rounding: str
    survival: Survival
    worst: str
    worst_lost: float

    @property
    def verdict(self) -> str:
        """`ok`, `weak` or `drowned`. NaN, which should never occur, counts as drowned."""
        lost = self.survival.lost
        return "ok" if lost < WEAK else "weak" if lost < DROWNED else "drowned"

    def to_dict(self) -> dict[str, Any]:
        """The group as JSON's types, for the report."""
        own = {name: value for name, value in vars(self).items() if name != "survival"}
        return own | {"verdict": self.verdict, "worst_lost": _digits(self.worst_lost), **self.survival.to_dict()}


def by_group(outcomes: Iterable[Outcome]) -> list[GroupOutcome]:
    """Group outcomes by layer and projection, with the largest loss first. Weights whose delta is zero do not count."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.survival.delta > 0:
            groups.setdefault(outcome.group, []).append(outcome)
    found = []
    for (layer, projection), members in groups.items():
        worst = max(members, key=lambda member: member.survival.lost)
        roundings = sorted({member.rounding for member in members})
        survival = Survival.total(member.survival for member in members)
        lost = worst.survival.lost
        found.append(GroupOutcome(layer, projection, len(members), "/".join(roundings), survival, worst.name, lost))
    return sorted(found, key=lambda group: (-group.survival.lost, group.layer, group.projection))


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum(dtype=torch.float64))


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0


def _digits(value: float) -> float:
    """Round to four digits, because more would depend on the order of a sum and so on the number of threads."""
    return float(f"{value:.4g}")
