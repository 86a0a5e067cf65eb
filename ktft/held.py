"""The experts of a layer that a process holds: all of them, or a part, while other processes hold the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ELSEWHERE = -1
"""This value in a layer's `top_k_index` means that the expert is computed elsewhere and adds nothing here."""
_WRONG = -2  # It is neither an expert's number nor `ELSEWHERE`, so the layer refuses it


@dataclass(frozen=True)
class HeldExperts:
    """`count` consecutive experts, from number `first` on, of a layer that has `num_experts`.

    Checkpoints, adapters and routers number experts as the model does. A layer, its LoRA tensors and its lanes hold
    only these experts and number them from 0.

    Raises:
        ValueError: the layer does not have these experts.
    """

    first: int
    count: int
    num_experts: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.count < 1 or self.first + self.count > self.num_experts:
            raise ValueError(
                f"a process cannot hold experts {self.first} to {self.first + self.count - 1} of a layer that has "
                f"{self.num_experts}; give a range within 0 to {self.num_experts - 1}"
            )

    @classmethod
    def of(cls, num_experts: int, part: tuple[int, int] | None = None) -> HeldExperts:
        """Experts `part[0]` to `part[1] - 1` of a layer that has `num_experts`; all of them if `part` is None."""
        first, end = part or (0, num_experts)
        return cls(first, end - first, num_experts)

    @property
    def whole(self) -> bool:
        return self.count == self.num_experts

    @property
    def numbers(self) -> range:
        """The experts' numbers in the model."""
        return range(self.first, self.first + self.count)

    @property
    def share(self) -> float:
        """The share of the layer's experts, at most 1."""
        return self.count / self.num_experts

    def local(self, top_k_index: Tensor) -> Tensor:
        """The routes with the layer's own numbers of experts, and `ELSEWHERE` where another process has the expert.

        A number that no expert of the model has becomes one that the layer refuses.
        """
        if self.whole:
            return top_k_index
        index = top_k_index.long()
        here = (index >= self.first) & (index < self.first + self.count)
        known = (index >= 0) & (index < self.num_experts)
        return (index - self.first).where(here, known.long() * (ELSEWHERE - _WRONG) + _WRONG)
