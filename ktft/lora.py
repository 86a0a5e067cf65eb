"""The LoRA tensors of one layer's routed experts, in the form in which adapters pass them to the kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ktft.config import PROJECTIONS

MAX_RANK = 256
"""The largest rank that the kernels take (`kMaxRank` in csrc/moe/layer.cc)."""
RANK_BLOCK = 16
"""Packed adapters have places for ranks in multiples of this (`kRankBlock` in csrc/moe/lora.h)."""


NOT_SHARED = (
    "expert_lora is 'shared_outer', and {}: each process would train a shared matrix of its own. Set expert_lora: "
    "per_expert, or start one process, which has all experts"
)


@dataclass(frozen=True)
class LoraPair:
    """The adapters of one projection of every expert: W x + scaling · B (A x), Hu et al. 2021 (arXiv 2106.09685).

    `a` is `[num_experts, r, in_features]`, `b` is `[num_experts, out_features, r]`, fp32 or bf16, on the CPU.
    """

    a: Tensor
    b: Tensor
    scaling: float


@dataclass(frozen=True)
class ExpertLora:
    """Adapters by projection name (`gate_proj`, `up_proj`, `down_proj`). A projection that is absent has no adapter.

    `dropout` is the probability of zeroing an element of a projection's adapter input; `seed` chooses the mask, and
    the same seed gives the same mask again in backward. Pass 0.0 in evaluation. `first_route` is the number of
    (token, expert) pairs before those of a call: two calls with one seed then get the masks of one call with both.
    `streams` holds what makes the masks on a device, see `ktft.lanes.ops.dropout.write_streams`.
    """

    pairs: dict[str, LoraPair]
    dropout: float = 0.0
    seed: int = 0
    first_route: int = 0
    streams: Tensor | None = None

    def parameters(self) -> list[Tensor]:
        """The tensors a and b of each projection that has an adapter, in the order of `PROJECTIONS`."""
        return [tensor for name in PROJECTIONS if (pair := self.pairs.get(name)) for tensor in (pair.a, pair.b)]
