"""LoRA of several adapters on a linear layer, by each row's place, compared with the products of each alone."""

from __future__ import annotations

import torch
from torch import nn

from ktft.serve.runtime.placed_lora import LoraOperations, PlacedLora
from ktft.serve.runtime.served_adapter import SliceLora, Slot
from ktft.serve.runtime.step_adapters import StepAdapters

INPUTS, PARTS, MOST = 288, (80, 16, 7), 40
SLOT = Slot(INPUTS, PARTS)
BOUNDS = SLOT.bounds


def slices(rank: int, *parts: int, seed: int) -> list[SliceLora]:
    """LoRA on these parts of the output."""
    drawn = torch.Generator().manual_seed(seed)
    return [
        SliceLora(
            BOUNDS[part],
            BOUNDS[part + 1],
            torch.randn(rank, INPUTS, generator=drawn),
            torch.randn(PARTS[part], rank, generator=drawn),
        )
        for part in parts
    ]


def made(device: str = "cpu", places: int = 3, operations: LoraOperations | None = None) -> PlacedLora:
    """A slot for so many adapters, with room for 64 rows of a step."""
    step = StepAdapters()
    step.reserve(torch.device(device), 128, places)
    lora = PlacedLora(nn.Linear(INPUTS, sum(PARTS), device=device), "layers.3.qkv", SLOT, MOST, places, step)
    lora._operations = operations or lora._operations
    return lora


def load(lora: PlacedLora, number: int, given: list[SliceLora]) -> None:
    """As a server loads an adapter."""
    state = lora.joined(number, lora.stacked(given))
    lora.step.take(number)
    lora.share(state)


def unload(lora: PlacedLora, number: int) -> None:
    """As a server takes one out."""
    state = lora.parted(number)
    lora.step.leave(number)
    lora.share(state)


def product(lora: PlacedLora, x: torch.Tensor) -> torch.Tensor:
    """What the slot adds to a product of zeros, of rows that lie within larger ones."""
    wide = torch.zeros(len(x), sum(PARTS) + 9, dtype=torch.float32, device=x.device)
    out = wide[:, : sum(PARTS)]
    lora.add(x, out)
    assert not wide[:, sum(PARTS) :].any()
    return out.cpu()


def expected(x: torch.Tensor, numbers: list[int], loaded: dict[int, list[SliceLora]]) -> torch.Tensor:
    """B (A x) of each row's adapter, in fp32."""
    out = torch.zeros(len(x), sum(PARTS))
    for row, number in enumerate(numbers):
        for each in loaded.get(number, []):
            out[row, each.start : each.stop] = each.b @ (each.a @ x[row].float())
    return out


def check(device: str = "cpu", operations: LoraOperations | None = None, rows: tuple[int, ...] = (1, 5, 64)) -> None:
    """Adapters of other ranks and parts come, go, and leave nothing behind for the next at their place."""
    lora = made(device, operations=operations)
    loaded = {7: slices(40, 0, 1, 2, seed=1), 8: slices(1, 1, seed=2), 9: slices(17, 0, 2, seed=3)}
    for number, given in loaded.items():
        load(lora, number, given)
    for change in (None, 7):
        if change is not None:
            unload(lora, change)
            del loaded[change]
            loaded[12] = slices(3, 2, seed=4)
            load(lora, 12, loaded[12])
        for count in rows:
            x = torch.randn(count, INPUTS).bfloat16()
            numbers = [(0, 9, 7, 8, 12)[(count + i) % 5] for i in range(count)]
            lora.step.set(numbers, loaded)
            found, wanted = product(lora, x.to(device)), expected(x, numbers, loaded)
            torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3 * INPUTS**0.5)
            assert not found[(wanted == 0).all(1)].any()
