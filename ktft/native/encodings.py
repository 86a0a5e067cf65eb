"""How a weight of codes with scales is encoded, by the types of its tensors, which are checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ktft.native.extension import ENCODINGS, core
from ktft.native.tensors import address, described

CODED = {
    (torch.float8_e4m3fn, torch.float32): "fp8",
    (torch.uint8, torch.float32): "int4",
    (torch.uint8, torch.uint8): "mxfp4",
}
"""Types of codes and of their scales -> the core's `Encoding`, which has the name of the expert format that keeps both
unchanged."""


def source_arguments(
    weight: Tensor, scales: Tensor | None, block: tuple[int, int] | None, zeros: Tensor | None, owner: str
) -> tuple[tuple[Any, ...], list[Tensor]]:
    """A weight as the core takes it, and the tensors that must live until it has. See `ExpertLayer.load` for the
    arguments; `owner` is what messages say before the tensor's name.

    Raises:
        ValueError: a shape or dtype is wrong, or scales hold NaN, Inf or a negative fp8 scale.
    """
    if weight.dim() != 2 or weight.device.type != "cpu" or (weight.dtype not in ENCODINGS and scales is None):
        raise ValueError(
            "expected a 2-D fp32, bf16 or fp16 CPU tensor, or codes and scales, "
            f"got {weight.dtype} {list(weight.shape)} on {weight.device}"
        )
    weight = weight.contiguous()
    rows, cols = weight.shape
    encoding, block = ENCODINGS.get(weight.dtype), block or (0, 0)
    if scales is not None:
        encoding, cols, block = check_codes(weight, scales, block, zeros)
        scales, zeros = scales.contiguous(), None if zeros is None else zeros.contiguous()
    named = (("a weight", weight), ("its scales", scales), ("its zero points", zeros))
    at = [0 if tensor is None else address(tensor, f"{owner}{name}") for name, tensor in named]
    held = [tensor for _, tensor in named if tensor is not None]
    return (at[0], encoding, rows, cols, at[1], *block, at[2]), held


def check_codes(
    codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None
) -> tuple[Any, int, tuple[int, int]]:
    """The encoding, the number of columns and the block of a weight that is given as codes."""
    nibbles = codes.dtype == torch.uint8
    if codes.dtype not in {dtype for dtype, _ in CODED}:
        raise ValueError(f"codes with scales are float8_e4m3fn, or uint8 of two 4-bit codes; got {codes.dtype}")
    name = CODED.get((codes.dtype, scales.dtype))
    if name is None:
        raise ValueError(f"scales of {codes.dtype} codes cannot be {scales.dtype}")
    rows, cols = codes.shape[0], codes.shape[1] * (2 if nibbles else 1)
    block = block if all(block) else (1, 32) if nibbles else (128, 128)
    expected = (-(-rows // block[0]), -(-cols // block[1]))
    if scales.shape != expected or scales.device.type != "cpu" or (nibbles and block[1] % 2 and block[1] < cols):
        raise ValueError(
            f"codes [{rows}, {cols}] in blocks of {list(block)} need scales {list(expected)}, got {list(scales.shape)}"
        )
    fits = zeros is None or (zeros.shape == expected and zeros.dtype == torch.uint8 and zeros.device.type == "cpu")
    if zeros is not None and (name != "int4" or not fits):
        raise ValueError(f"zero points must be uint8 {list(expected)} of int4 on the CPU, got {described(zeros)}")
    if scales.dtype == torch.float32:
        if not scales.isfinite().all():
            raise ValueError("its scales hold NaN or Inf")
        if not nibbles and bool((scales < 0).any()):
            raise ValueError("its scales hold a negative number, which no fp8 scale is")
    return getattr(core.Encoding, name), cols, block
