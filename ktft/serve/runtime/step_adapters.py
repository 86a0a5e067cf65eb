"""Which adapter each token of a step of the engine has."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from ktft.device import device_of

BASE = 0
"""The number of the base model in a step. Adapters have higher ones."""
NOWHERE = -1
"""The place of the base model."""


class StepAdapters:
    """The adapters of the step that is computed, which an engine sets before it and all layers read.

    CUDA graphs read from the device which adapter a token has: not by its number, which is never given again, but by
    its place among those that are loaded, since memory for so many was taken at the start.

    Attributes:
        active: the numbers of the adapters that tokens of the step have, ascending. It is empty outside a server with
            several adapters, so that layers need not look further.
        mixed: whether tokens may have adapters, or will when what is captured now is replayed.
        places: the place of each adapter, by its number; empty without a device.
        of_token: `[max_tokens]` int32: the place of each token's adapter, on the device; None without one.
    """

    def __init__(self) -> None:
        self.active: tuple[int, ...] = ()
        self.mixed = False
        self.places: dict[int, int] = {}
        self.of_token: Tensor | None = None
        self._free: list[int] = []
        self._of_token = torch.zeros(0, dtype=torch.int64)
        self._rows: dict[int, Tensor | None] = {}

    def reserve(self, device: torch.device, max_tokens: int, places: int) -> None:
        """Make places on a device, for the tokens of the largest step."""
        self.of_token = torch.full((max_tokens,), NOWHERE, dtype=torch.int32, device=device)
        self._free = list(range(places))

    def take(self, number: int) -> int:
        """Give an adapter a place. Raises ValueError if all are taken."""
        if not self._free:
            raise ValueError(
                f"there is room for {len(self.places)} adapters, which are loaded; unload one, or start the server "
                f"with --max-adapters {len(self.places) + 1}"
            )
        self._free.sort()
        self.places[number] = self._free.pop(0)
        return self.places[number]

    def leave(self, number: int) -> None:
        """Make the place of an adapter free."""
        self._free.append(self.places.pop(number))

    def set(self, of_token: Sequence[int], loaded: Collection[int]) -> None:
        """Say which adapter each token of the coming step has, by number; those that are not `loaded` are the base.

        A number that is not loaded any more is that of a request whose client has gone: an adapter is taken out when
        its last request has ended, which the engine may learn some steps later. Nobody reads these tokens.
        """
        of = torch.as_tensor(of_token, dtype=torch.int64, device="cpu")
        numbers = of.unique().tolist()
        found = [number for number in numbers if number in loaded]
        were_mixed, self.mixed = self.mixed, any(number != BASE for number in numbers)
        self.active, self._of_token = tuple(found), of
        self._rows = {n: None if found == [n] and bool((of == n).all()) else (of == n).nonzero()[:, 0] for n in found}
        if self.of_token is not None and (self.mixed or were_mixed):
            self._set_places(self.of_token, of)

    def _set_places(self, to: Tensor, of: Tensor) -> None:
        places = torch.full(to.shape, NOWHERE, dtype=torch.int32, pin_memory=device_of(to.device).pin_memory)
        for number in self.active:
            places[: len(of)][of == number] = self.places[number]
        to.copy_(places, non_blocking=True)
        self._rows = {n: rows if rows is None else rows.to(to.device) for n, rows in self._rows.items()}

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
        rows = (self.of_rows(count, layer) == number).nonzero()[:, 0]
        return rows if self.of_token is None else rows.to(self.of_token.device)

    def groups(self, count: int, layer: str, apart: Collection[int]) -> list[tuple[int, Tensor]]:
        """The rows of each of the adapters `apart`, `[n]` int64, by its number, and of all others as `BASE`'s.

        Only those with rows are listed. Raises as `of_rows`.
        """
        numbers = self.of_rows(count, layer)
        here = [number for number in self.active if number in apart]
        numbers = numbers.where(torch.isin(numbers, torch.tensor(here, dtype=torch.int64)), BASE)
        found = [(number, (numbers == number).nonzero()[:, 0]) for number in (BASE, *here)]
        device = "cpu" if self.of_token is None else self.of_token.device
        return [(number, rows.to(device)) for number, rows in found if len(rows)]
