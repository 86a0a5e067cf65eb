"""The experts of a layer that a process holds: all of them, or a part, while other processes hold the rest."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, device

ELSEWHERE = -1
"""This value in a layer's `top_k_index` means that the expert is computed elsewhere and adds nothing here."""
_WRONG = -2  # It is neither an expert's number nor `ELSEWHERE`, so the layer refuses it


@dataclass(frozen=True)
class HeldExperts:
    """The experts with these `numbers`, in ascending order, of a layer that has `num_experts`.

    Checkpoints, adapters and routers number experts as the model does. A layer, its LoRA tensors and its lanes hold
    only these experts and number them from 0.

    Attributes:
        zero: how many numbers from `num_experts` on the router also gives: experts without weights, which whoever calls
            the layer computes. The layer adds nothing for them.

    Raises:
        ValueError: the layer does not have these experts, or there is none.
    """

    numbers: tuple[int, ...]
    num_experts: int
    zero: int = 0

    def __post_init__(self) -> None:
        known = range(self.num_experts)
        if not self.numbers or self.numbers != tuple(sorted({*self.numbers} & {*known})):
            raise ValueError(
                f"a process cannot hold experts {_listed(self.numbers) or '(none)'} of a layer that has "
                f"{self.num_experts}; give numbers within 0 to {self.num_experts - 1}, in ascending order"
            )

    @classmethod
    def of(cls, num_experts: int, part: tuple[int, int] | None = None) -> HeldExperts:
        """Experts `part[0]` to `part[1] - 1` of a layer that has `num_experts`; all of them if `part` is None."""
        return cls(tuple(range(*(part or (0, num_experts)))), num_experts)

    @classmethod
    def share_of(cls, num_experts: int, rank: int, ranks: int) -> HeldExperts:
        """Every `ranks`-th expert, from number `rank` on, so that neighbours, which are often hot together, part.

        Raises:
            ValueError: there are more ranks than experts.
        """
        return cls.balanced([0] * num_experts, rank, ranks)

    @classmethod
    def balanced(cls, tokens: Sequence[int], rank: int, ranks: int) -> HeldExperts:
        """A rank's share if these are the tokens that each expert got: as many experts as `share_of` gives, so chosen
        that all ranks have about as many tokens.

        The experts with the most tokens choose first, each the rank with the fewest so far. All ranks compute the same,
        and experts with equal counts are shared like those without.

        Raises:
            ValueError: there are more ranks than experts.
        """
        num_experts = len(tokens)
        if ranks > num_experts:
            raise ValueError(
                f"{ranks} processes cannot share the {num_experts} experts of a layer: each must hold one at least; "
                f"start at most {num_experts}"
            )
        shares: list[list[int]] = [[] for _ in range(ranks)]
        got = [0] * ranks
        for expert in sorted(range(num_experts), key=lambda number: -tokens[number]):
            free = (each for each in range(ranks) if len(shares[each]) < len(range(each, num_experts, ranks)))
            to = min(free, key=lambda each: (got[each], len(shares[each])))
            shares[to].append(expert)
            got[to] += tokens[expert]
        return cls(tuple(sorted(shares[rank])), num_experts)

    @property
    def count(self) -> int:
        return len(self.numbers)

    @property
    def whole(self) -> bool:
        return self.count == self.num_experts

    @property
    def every_route(self) -> bool:
        """Whether every route leads to an expert that is held."""
        return self.whole and not self.zero

    @property
    def share(self) -> float:
        """The share of the layer's experts, at most 1."""
        return self.count / self.num_experts

    @property
    def places(self) -> dict[int, int]:
        """Number of an expert in the model -> its number here."""
        return _places(self)

    def local(self, top_k_index: Tensor) -> Tensor:
        """The routes with the layer's own numbers of experts, and `ELSEWHERE` where another process has the expert,
        or it has no weights.

        A number that no expert of the model has becomes one that the layer refuses.
        """
        if self.every_route:
            return top_k_index
        last = self.num_experts + self.zero + 1
        return _table(self, top_k_index.device)[(top_k_index.long() + 1).clamp(0, last)]

    def __str__(self) -> str:
        """The numbers in few words."""
        first, last, step = self.numbers[0], self.numbers[-1], (self.numbers[1:] or self.numbers)[0] - self.numbers[0]
        if self.numbers == tuple(range(first, last + 1)):
            return f"{first} to {last}"
        if step > 0 and self.numbers == tuple(range(first, last + 1, step)):
            return f"{first}, {first + step} to {last} by {step}"
        return _listed(self.numbers)


def _listed(numbers: Iterable[int], most: int = 6) -> str:
    shown = [str(number) for number in numbers]
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")


@functools.lru_cache(maxsize=1024)
def _places(held: HeldExperts) -> dict[int, int]:
    return {number: place for place, number in enumerate(held.numbers)}


@functools.lru_cache(maxsize=1024)
def _table(held: HeldExperts, on: device) -> Tensor:
    """`[num_experts + zero + 2]` int64: place of each number from -1 to `num_experts + zero`."""
    import torch  # not at the top, because plans need no torch

    places = [held.places.get(number, ELSEWHERE) for number in range(held.num_experts)]
    return torch.tensor([_WRONG, *places, *[ELSEWHERE] * held.zero, _WRONG], device=on)
