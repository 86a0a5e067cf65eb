"""MoE blocks that call their routed experts in another way than `forward(hidden_states, top_k_index, top_k_weights)`.

ktft's experts take that call alone. Such a block gets a forward of its own, which does what the stock one does and
calls ktft's experts in the usual way. The other direction makes stock experts take the usual call, to compare both.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ktft.checkpoint.families import SCALED_INPUTS, Family


def _scaled_inputs(block: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """`Llama4TextMoe.forward`, with the chosen experts' rows alone: the stock one gives each token to every expert, as
    zeros to those that are not chosen.

    A score scales what goes into the gated activation, so it cannot be the weight of what comes out of it.
    """
    hidden_states = hidden_states.reshape(-1, block.hidden_dim)
    scores, logits = block.router(hidden_states)
    chosen = torch.topk(logits, block.top_k, dim=1).indices
    rows = hidden_states.unsqueeze(1) * scores.gather(1, chosen).unsqueeze(2)
    ones = torch.ones(chosen.numel(), 1, dtype=torch.float32, device=chosen.device)
    routed = block.experts(rows.flatten(0, 1), chosen.view(-1, 1), ones)
    return block.shared_expert(hidden_states) + routed.view_as(rows).sum(dim=1), logits


class ScaledInputs(nn.Module):
    """Stock experts of such a block, which take the usual call here."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map rows `[T, H]` and their experts `[T, 1]` to `[T, H]`."""
        tokens, chosen = torch.arange(len(hidden_states), device=hidden_states.device), top_k_index[:, 0]
        every = hidden_states.new_zeros(len(self.experts.get_parameter("down_proj")), *hidden_states.shape)
        every = every.index_put((chosen, tokens), hidden_states)
        out: Tensor = self.experts(every.flatten(0, 1)).view_as(every)[chosen, tokens]
        return out * top_k_weights.to(out.dtype)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[nn.Module], nn.Module]]] = {
    SCALED_INPUTS: (_scaled_inputs, ScaledInputs)
}
"""`Family.call` -> the block's forward with ktft's experts, and what makes stock experts take the usual call."""


def call_usually(block: nn.Module, family: Family) -> None:
    """Make a block, whose experts are ktft's, call them in the usual way. Most blocks do, and stay as they are."""
    if family.call is not None:
        block.__dict__["forward"] = MethodType(
            CALLS[family.call][0], block
        )  # a copy of the model copies it with its block


def taking_the_usual_call(experts: nn.Module, family: Family) -> nn.Module:
    """Stock experts, or a module around them, that the block of `call_usually` can call."""
    return experts if family.call is None else CALLS[family.call][1](experts)
