"""LoRA dropout's masks, bit for bit those of the native kernels (csrc/moe/lora.cc, csrc/kernels/vector-inl.h).

A mask depends on the seed, the projection, the route and the column alone: splitmix64's finalizer makes a key for each
route's input to a projection, the 32-bit finalizer "lowbias32" (C. Wellons, hash-prospector) a number for each column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.device import device_of
from ktft.lora import ExpertLora

STEP64, STEP32 = 0x9E3779B97F4A7C15, 0x9E3779B9
MIX64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
MIX32 = ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))


def signed(value: int, bits: int) -> int:
    """The two's complement number with these bits."""
    value %= 2**bits
    return value - 2**bits if value >> bits - 1 else value


@dataclass(frozen=True)
class Dropout:
    """What is dropped of the input of one projection's adapter."""

    probability: float  # with which an element becomes zero
    stream: Tensor  # the row of `write_streams`

    @classmethod
    def of(cls, lora: ExpertLora, projection: str) -> Dropout | None:
        """The dropout of a projection; None if nothing is dropped."""
        if lora.dropout <= 0:
            return None
        assert lora.streams is not None
        return cls(lora.dropout, lora.streams[PROJECTIONS.index(projection)])

    @property
    def threshold(self) -> int:
        """An element is dropped if its 32-bit number is below this."""
        return int(float(np.float32(self.probability)) * 2.0**32)


def room_for_streams(device: torch.device) -> Tensor:
    """Memory for the streams of a call: int64 `[3, 2]`. Only the first column is used; the second aligns the rows."""
    return torch.empty(len(PROJECTIONS), 2, dtype=torch.int64, device=device)


def write_streams(lora: ExpertLora, to: Tensor) -> Tensor:
    """Write what tells the masks of this call from those of others, a number for each projection. Returns `to`.

    Kernels read it from memory, so that recorded ones need not be made anew for each call.
    """
    numbers = []
    for row in range(len(PROJECTIONS)):
        z = (lora.seed + STEP64 * (row + 1)) % 2**64
        for shift, factor in MIX64:
            z = (z ^ z >> shift) * factor % 2**64
        numbers.append([signed(z + lora.first_route, 64), 0])
    on_host = torch.tensor(numbers, dtype=to.dtype, pin_memory=device_of(to.device).pin_memory)
    return to.copy_(on_host, non_blocking=True)


def stays(dropout: Dropout, routes: Tensor, cols: int) -> Tensor:
    """`[rows, cols]` bool: which elements are kept in the rows of `routes` (integers, on any device)."""
    key = routes.long() + dropout.stream[0]
    for shift, factor in MIX64:
        key = (key ^ key >> shift & (1 << 64 - shift) - 1) * signed(factor, 64)
    z = torch.arange(cols, dtype=torch.int32, device=routes.device) * signed(STEP32, 32)
    z = z ^ key.to(torch.int32)[:, None]
    for shift, factor in MIX32:
        z = (z ^ z >> shift & (1 << 32 - shift) - 1) * signed(factor, 32)
    z = z ^ (key >> 32).to(torch.int32)[:, None]
    # Unsigned numbers compare like signed ones whose first bit is flipped
    return (z ^ -(2**31)) >= signed(dropout.threshold ^ 2**31, 32)
