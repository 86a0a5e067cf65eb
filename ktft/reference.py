"""The routed experts in plain fp32 torch. This is the shortest definition of what the native kernels compute, and
tests compare the kernels with it.

For token t with experts e_1..e_k and routing weights w_1..w_k:

    g = x W_gᵀ + b_g + s_g (drop(x) A_gᵀ) B_gᵀ    and likewise for u
    h = SiLU(g) · u, or the formula of `Swiglu`; max(u, 0)² where experts have no gate
    y_t = Σ_j w_j (h W_dᵀ + b_d + s_d (drop(h) A_dᵀ) B_dᵀ)

Only some families have biases.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora
from ktft.swiglu import SILU, Swiglu


def moe(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate: Tensor | None,
    up: Tensor,
    down: Tensor,
    lora: ExpertLora | None = None,
    swiglu: Swiglu = SILU,
    biases: dict[str, Tensor] | None = None,
) -> Tensor:
    """The weighted sum over the chosen experts, differentiable in hidden states, routing weights and LoRA.

    Args:
        hidden_states: `[T, H]`, any float dtype.
        top_k_index: `[T, k]`, integer expert numbers.
        top_k_weights: `[T, k]`, float.
        gate, up: `[E, I, H]`; down: `[E, H, I]`: frozen weights. The gate is ignored if the activation has none.
        lora: adapters of the three projections; LoRA dropout is not applied here.
        biases: projection -> `[E, out_features]`, frozen; None where the family has none.

    Returns:
        `[T, H]` in the dtype of `hidden_states`; everything in between is fp32.
    """
    matrices = dict(zip(PROJECTIONS, (gate, up, down), strict=True))

    def project(x: Tensor, expert: int, name: str) -> Tensor:
        weight = matrices[name]
        assert weight is not None
        y = F.linear(x, weight[expert].float(), biases[name][expert].float() if biases else None)
        pair = lora.pairs.get(name) if lora is not None else None
        if pair is not None:
            y = y + pair.scaling * F.linear(F.linear(x, pair.a[expert].float()), pair.b[expert].float())
        return y

    x, weights = hidden_states.float(), top_k_weights.float()
    out = torch.zeros_like(x)
    for expert in top_k_index.unique().tolist():
        token, slot = torch.where(top_k_index == expert)
        rows = x[token]
        u = project(rows, expert, "up_proj")
        if swiglu.gated:
            g = project(rows, expert, "gate_proj").clamp(max=swiglu.gate_most)
            u = u.clamp(-swiglu.limit, swiglu.limit)
            h = g * torch.sigmoid(swiglu.alpha * g + swiglu.cubic * g**3) * (u + swiglu.shift)
        else:
            h = F.relu(u).square()
        out = out.index_add(0, token, project(h, expert, "down_proj") * weights[token, slot, None])
    return out.to(hidden_states.dtype)
