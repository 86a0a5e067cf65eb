"""What an adapter makes of a weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoraDelta:
    """scaling x B A, of one matrix `[out_features, in_features]`."""

    a: Tensor
    b: Tensor
    scaling: float

    def matrix(self, base: Tensor) -> Tensor:
        """fp32; `base`, the weight that it is added to, does not matter."""
        return self.scaling * (self.b @ self.a)

    def inputs(self) -> Tensor | None:
        """`[in_features, r]`: an orthonormal basis of the inputs that the adapter reacts to."""
        return torch.linalg.qr(self.a.T).Q


@dataclass(frozen=True)
class Replacement:
    """A tensor that the adapter holds whole (`modules_to_save`)."""

    tensor: Tensor

    def matrix(self, base: Tensor) -> Tensor:
        """What turns `base` into it."""
        return self.tensor - base

    def inputs(self) -> Tensor | None:
        """All of them."""
        return None


Delta = LoraDelta | Replacement
