"""The routed experts in plain fp32 torch: what the native kernels are compared with, and the shortest definition of
what they compute.

For token t with experts e_1..e_k and routing weights w_1..w_k:

    g = x W_gᵀ + s_g (drop(x) A_gᵀ) B_gᵀ          u likewise
    h = SiLU(g) · u
    y_t = Σ_j w_j (h W_dᵀ + s_d (drop(h) A_dᵀ) B_dᵀ)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ktft.lora import ExpertLora


def moe(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    lora: ExpertLora | None = None,
) -> Tensor:
    """Weighted sum over the chosen experts, differentiable in hidden states, routing weights and LoRA.

    Args:
        hidden_states: `[T, H]`, any float dtype.
        top_k_index: `[T, k]`, integer expert numbers.
        top_k_weights: `[T, k]`, float.
        gate, up: `[E, I, H]`; down: `[E, H, I]`: frozen weights.
        lora: adapters of the three projections; LoRA dropout is not applied here.

    Returns:
        `[T, H]` in the dtype of `hidden_states`; everything in between is fp32.
    """

    def project(x: Tensor, expert: int, name: str, weight: Tensor) -> Tensor:
        y = F.linear(x, weight[expert].float())
        pair = lora.pairs.get(name) if lora is not None else None
        if pair is not None:
            y = y + pair.scaling * F.linear(F.linear(x, pair.a[expert].float()), pair.b[expert].float())
        return y

    x, weights = hidden_states.float(), top_k_weights.float()
    out = torch.zeros_like(x)
    for expert in top_k_index.unique().tolist():
        token, slot = torch.where(top_k_index == expert)
        rows = x[token]
        h = F.silu(project(rows, expert, "gate_proj", gate)) * project(rows, expert, "up_proj", up)
        out = out.index_add(0, token, project(h, expert, "down_proj", down) * weights[token, slot, None])
    return out.to(hidden_states.dtype)
