"""The table of embeddings in host memory: a batch needs some thousand of its rows, so the GPU need not hold it."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ktft.dense.linear import PackedLinear
from ktft.device import device_of


class HostEmbedding(nn.Embedding):
    """`nn.Embedding` whose rows are gathered in host memory and copied to the device of the token ids.

    `weight` keeps shape, dtype and device, but takes one row of memory, which is NaN: whoever reads it sees that. A
    state dict has the table itself. `to_host` makes one of an embedding in place, and `to_device` undoes that.

    Attributes:
        table: `[num_embeddings, embedding_dim]`, in host memory.
    """

    table: Tensor

    def forward(self, input: Tensor) -> Tensor:
        """Token ids of any shape -> their rows."""
        ids = input.detach().flatten().cpu()
        pinned = device_of(input.device).pin_memory
        rows = torch.empty(ids.numel(), self.embedding_dim, dtype=self.table.dtype, pin_memory=pinned)
        torch.index_select(self.table, 0, ids.long(), out=rows)
        return rows.to(input.device, non_blocking=True).view(*input.shape, self.embedding_dim)


def to_host(model: nn.Module) -> HostEmbedding | None:
    """Keep the table of a model's embeddings in host memory, if that is where its other dense weights are.

    Returns:
        The embedding; None if it stays as it is: it is trained, shares its weight with the output layer, or is of a
        class of its own.
    """
    streamed = any(isinstance(module, PackedLinear) and module.is_streamed for module in model.modules())
    get = getattr(model, "get_input_embeddings", None)
    module = get() if streamed and get is not None else None
    if type(module) is not nn.Embedding or module.weight.requires_grad or module.max_norm is not None:
        return None
    head = cast(Any, model).get_output_embeddings()
    if head is not None and getattr(head, "weight", None) is module.weight:
        return None
    table = module.weight.data
    module.table = table.cpu()
    module.__class__ = HostEmbedding
    _stand_in(module, table[:1].clone().fill_(torch.nan).expand(table.shape))
    module._register_state_dict_hook(_own_table)
    return cast(HostEmbedding, module)


def to_device(module: HostEmbedding) -> None:
    """Give the table back to its device."""
    table, device = module.table, module.weight.device
    del module.table
    module.__class__ = nn.Embedding  # type: ignore[assignment]
    for key, hook in list(module._state_dict_hooks.items()):
        if hook is _own_table:
            del module._state_dict_hooks[key]
    _stand_in(module, table.to(device))


def _stand_in(module: nn.Embedding, weight: Tensor) -> None:
    module.weight = nn.Parameter(weight, requires_grad=False)


def _own_table(module: HostEmbedding, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}weight"] = module.table
