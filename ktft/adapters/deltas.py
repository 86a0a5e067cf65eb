"""How an adapter changes one weight: LoRA adds a product to it, a replacement takes its place."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoraDelta:
    """The delta scaling x B A of one matrix `[out_features, in_features]`."""

    a: Tensor
    b: Tensor
    scaling: float

    def matrix(self, base: Tensor) -> Tensor:
        """The delta in fp32. It does not depend on `base`, the weight that it is added to."""
        return self.scaling * (self.b @ self.a)

    def inputs(self) -> Tensor | None:
        """An orthonormal basis `[in_features, r]` of the inputs that the adapter reacts to."""
        return torch.linalg.qr(self.a.T).Q


@dataclass(frozen=True)
class Replacement:
    """A tensor that the adapter holds whole (`modules_to_save`)."""

    tensor: Tensor

    def matrix(self, base: Tensor) -> Tensor:
        """The difference between the replacement and `base`."""
        return self.tensor - base

    def inputs(self) -> Tensor | None:
        """None: a replacement reacts to all inputs."""
        return None


Delta = LoraDelta | Replacement
