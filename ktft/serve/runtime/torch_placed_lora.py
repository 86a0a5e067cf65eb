"""`LoraOperations` in torch operations, for any device. All adapters are applied to all rows, so it is not fast."""

from __future__ import annotations

import torch
from torch import Tensor

from ktft.serve.runtime.placed_lora import LoraStacks


def add(stacks: LoraStacks, x: Tensor, out: Tensor, of_token: Tensor) -> None:
    """See `LoraOperations`."""
    places, width = stacks.b.shape[0], stacks.b.shape[2]
    ranks = torch.arange(width, device=x.device) < stacks.ranks[:, None]
    own = of_token[:, None] == torch.arange(places, device=x.device)
    low = torch.einsum("ti,spri->tspr", x.float(), stacks.a)
    # No product: it would make NaN of another adapter's infinity, or of what was here before
    low = low.where(own[:, :, None, None] & ranks[:, None], 0)
    sums = zip(stacks.b.split(stacks.slot.parts, 1), out.split(stacks.slot.parts, 1), strict=True)
    for part, (b, rows) in enumerate(sums):
        rows.add_(torch.einsum("tsr,sor->to", low[:, :, part], b.where(ranks[:, None], 0)))
