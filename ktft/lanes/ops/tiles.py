"""Sizes that the operations share."""

from __future__ import annotations

PLACES = 16
"""LoRA ranks and biases take a multiple of this many columns of a decoded matrix, so that rows stay aligned. Tensor
cores multiply at least this many anyway.
"""


# Triton has these two for its kernels; called from Python, its versions take ten times as long
def cdiv(value: int, by: int) -> int:
    """The quotient, rounded up."""
    return -(-value // by)


def power_of_2(value: int) -> int:
    """The smallest power of two that is not smaller than `value`."""
    return 1 << (value - 1).bit_length()
