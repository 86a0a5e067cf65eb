"""Which adapter each token of a step of the engine has."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

BASE = 0
"""The number of the base model in a step. Adapters have higher ones."""


class StepAdapters:
    """The adapters of the step that is computed, which an engine sets before it and all layers read.

    Attributes:
        active: the numbers of the adapters that tokens of the step have, ascending. It is empty outside a server with
            several adapters, so that layers need not look further.
    """

    def __init__(self) -> None:
        self.active: tuple[int, ...] = ()
        self._of_token = torch.zeros(0, dtype=torch.int64)
        self._rows: dict[int, Tensor | None] = {}

    def set(self, of_token: Sequence[int], loaded: Collection[int]) -> None:
        """Say which adapter each token of the coming step has, by number; those that are not `loaded` are the base.

        A number that is not loaded any more is that of a request whose client has gone: an adapter is taken out when
        its last request has ended, which the engine may learn some steps later. Nobody reads these tokens.
        """
        of = torch.as_tensor(of_token, dtype=torch.int64, device="cpu")
        found = [number for number in of.unique().tolist() if number in loaded]
        self.active, self._of_token = tuple(found), of
        self._rows = {n: None if found == [n] and bool((of == n).all()) else (of == n).nonzero()[:, 0] for n in found}

    def of_rows(self, count: int, layer: str) -> Tensor:
        """The number of each row's adapter, `[count]` int64. Rows beyond the step's tokens are padding, of the base.

        Raises:
            RuntimeError: the layer has fewer rows than the step has tokens, so nobody knows whose they are.
        """
        tokens = len(self._of_token)
        if count < tokens:
            raise RuntimeError(
                f"{layer} computes {count} rows of a step with {tokens} tokens, so their adapters are not known; serve "
                "the model merged (ktft merge), and report this"
            )
        if count == tokens:
            return self._of_token
        return torch.nn.functional.pad(self._of_token, (0, count - tokens), value=BASE)

    def rows_of(self, number: int, count: int, layer: str) -> Tensor | None:
        """The rows of an active adapter, `[n]` int64; None stands for all rows. Raises as `of_rows`."""
        if count == len(self._of_token):
            return self._rows[number]
        return (self.of_rows(count, layer) == number).nonzero()[:, 0]
