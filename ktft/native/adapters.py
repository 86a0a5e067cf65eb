"""Checks adapters and passes them to the core, with the places of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ktft.config import PROJECTIONS
from ktft.lora import ExpertLora
from ktft.native.extension import DTYPES, NATIVE_PROJECTIONS, core
from ktft.native.tensors import address, check_like


def native_lora(
    layer: str,
    num_experts: int,
    lora: ExpertLora | None,
    grads: Sequence[Tensor] | None = None,
    elsewhere: Tensor | None = None,
) -> tuple[Any, list[Tensor]]:
    """The core's view of the adapters, and the tensors it points into.

    Args:
        layer: the layer's name, for messages.
        lora: the adapters; None gives None.
        grads: fp32 tensors into which the gradients are written, for a and b of each projection in the order of
            `PROJECTIONS`.
        elsewhere: `[num_experts]` bool; the gradients of these experts are left as they are.

    Raises:
        ValueError: the core cannot take a shape, dtype or device.
    """
    if lora is None or not lora.pairs:
        return None, []
    if grads is not None:
        _check_gradients(layer, lora.parameters(), grads)
    left = 0
    if elsewhere is not None:
        name = f"{layer}: elsewhere"
        left = address(check_like(elsewhere, (num_experts,), torch.bool, name), name)
    native, tensors = core.Lora(lora.dropout, lora.seed, left), []
    places = iter([address(grad, "a LoRA gradient") for grad in grads or []])
    for name in PROJECTIONS:
        if (pair := lora.pairs.get(name)) is None:
            continue
        for which, tensor in (("lora_A", pair.a), ("lora_B", pair.b)):
            if tensor.dim() != 3 or tensor.shape[0] != num_experts or tensor.device.type != "cpu":
                raise ValueError(
                    f"{layer}.{name}.{which} must be a CPU tensor with {num_experts} experts in its first "
                    f"dimension, got {list(tensor.shape)} on {tensor.device}"
                )
            if tensor.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"{layer}.{name}.{which} must be fp32 or bf16, got {tensor.dtype}")
        if pair.a.shape[1] != pair.b.shape[2]:
            raise ValueError(f"{layer}.{name}: lora_A has rank {pair.a.shape[1]}, lora_B {pair.b.shape[2]}")
        a, b = pair.a.detach().contiguous(), pair.b.detach().contiguous()
        tensors += [a, b]
        native.add(
            NATIVE_PROJECTIONS[name],
            address(a, f"{layer}.{name}.lora_A"),
            DTYPES[a.dtype],
            address(b, f"{layer}.{name}.lora_B"),
            DTYPES[b.dtype],
            a.shape[1],
            a.shape[2],
            b.shape[1],
            pair.scaling,
            *(next(places) if grads else 0 for _ in range(2)),
        )
    return native, tensors


def _check_gradients(layer: str, parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    if len(grads) != len(parameters):
        raise ValueError(f"{layer}: {len(grads)} tensors for the gradients of {len(parameters)} LoRA tensors")
    for parameter, grad in zip(parameters, grads, strict=True):
        check_like(grad, parameter.shape, torch.float32, f"{layer}: the gradient of a LoRA tensor")
