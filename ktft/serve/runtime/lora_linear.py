"""LoRA on a linear layer of an engine's model, added to the product that the engine computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from ktft.serve.runtime.served_adapter import SliceLora, Slot
from ktft.serve.runtime.slots import AB
from ktft.serve.runtime.step_adapters import StepAdapters

FEW_ROWS = 64
"""Up to so many rows of several adapters, all adapters are applied to all rows, and what is not a row's own is masked.
With more rows that costs more than to gather those of each adapter."""


@dataclass(frozen=True)
class Shared:
    """LoRA of several adapters on one layer, side by side like one of all their ranks.

    Attributes:
        a: fp32 `[parts, ranks, input_size]`.
        b: fp32 `[output_size, ranks]`; it has the scaling.
        owners: `[ranks]` int64: the number of the adapter to which a rank belongs, in ascending order.
    """

    a: Tensor
    b: Tensor
    owners: Tensor


class LoraLinear:
    """B (A x) for every part of a layer's output, by each token's adapter. It is a `SharedSlot`.

    LoRA takes x in fp32, the dtype in which PEFT holds adapters, and its sum with the product is rounded once. Without
    an adapter it holds no tensors.

    Args:
        name: what messages call the layer.
        slot: its sizes.
        step: which adapter each token has.
    """

    def __init__(self, name: str, slot: Slot, step: StepAdapters) -> None:
        self.name, self.slot, self.step = name, slot, step
        self.shared: Shared | None = None

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Add to the product `out`, `[..., output_size]`, LoRA of its inputs `x`, `[..., input_size]`."""
        if self.shared is not None and self.step.active:
            self._add_shared(self.shared, x, out)
        return out

    def _add_shared(self, shared: Shared, x: Tensor, out: Tensor) -> None:
        """Add to each row of the product LoRA of the row's adapter, if it has one here."""
        step, name = self.step, self.name
        rows, sums = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if len(rows) <= FEW_ROWS and len(step.active) > 1:
            own = step.of_rows(len(rows), name)[:, None] == shared.owners
            _add(self.slot, shared.a, shared.b, rows, sums, own)
            return
        for number in step.active:
            mine = (shared.owners == number).nonzero()[:, 0]
            if not len(mine):
                continue
            columns = slice(int(mine[0]), int(mine[-1]) + 1)
            a, b = shared.a[:, columns], shared.b[:, columns]
            add_to_rows(self.slot, a, b, step.rows_of(number, len(rows), name), rows, sums)

    def joined(self, number: int, tensors: AB) -> Shared:
        a, b = tensors
        rank, parts = b.shape[1], len(self.slot.parts)
        own = Shared(a.view(parts, rank, -1), b, torch.full((rank,), number))
        if (old := self.shared) is None:
            return own
        return Shared(torch.cat([old.a, own.a], 1), torch.cat([old.b, own.b], 1), torch.cat([old.owners, own.owners]))

    def parted(self, number: int) -> Shared | None:
        if (old := self.shared) is None or not bool((stays := old.owners != number).any()):
            return None
        return old if bool(stays.all()) else Shared(old.a[:, stays], old.b[:, stays], old.owners[stays])

    def share(self, state: Shared | None) -> None:
        self.shared = state

    def stacked(self, slices: Sequence[SliceLora]) -> AB:
        return stacked(self.slot, slices)


def add_to_rows(slot: Slot, a: Tensor, b: Tensor, places: Tensor | None, x: Tensor, out: Tensor) -> None:
    """Add one adapter's B (A x) to the rows of the product that are its own: at `places`, or all.

    Args:
        a, b: fp32 `[parts, rank, input_size]` and `[output_size, rank]`.
        x, out: `[T, input_size]` and `[T, output_size]`.
    """
    if places is None:
        _add(slot, a, b, x, out)
        return
    some = out[places]
    _add(slot, a, b, x[places], some)
    out[places] = some


def _add(slot: Slot, a: Tensor, b: Tensor, x: Tensor, out: Tensor, own: Tensor | None = None) -> None:
    """Add B (A x) to the rows of `out`, of the ranks that are a row's own where not all are."""
    low = linear(x.to(torch.float32), a.reshape(-1, a.shape[-1])).view(len(x), *a.shape[:2])
    if own is not None:
        low.masked_fill_(~own[:, None], 0.0)  # a product would make NaN of another adapter's infinity
    for part, (rows, sums) in enumerate(zip(b.split(slot.parts), out.split(slot.parts, 1), strict=True)):
        sums.add_(linear(low[:, part], rows))


def stacked(slot: Slot, slices: Sequence[SliceLora]) -> AB:
    """LoRA on these rows of a layer's output as A `[parts * rank, input_size]` and B `[output_size, rank]`, fp32.

    They are in CPU memory, with zeros where there is no LoRA. The rank is the largest of the slices'.
    """
    rank, bounds = max((len(each.a) for each in slices), default=0), slot.bounds
    a = torch.zeros(len(slot.parts) * rank, slot.input_size, dtype=torch.float32, device="cpu")
    b = torch.zeros(bounds[-1], rank, dtype=torch.float32, device="cpu")
    for each in slices:
        b[each.start : each.stop, : each.b.shape[1]] = each.b
        for part in range(bounds.index(each.start), bounds.index(each.stop)):
            a[part * rank : part * rank + len(each.a)] = each.a
    return a, b
