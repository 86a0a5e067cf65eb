"""The expert formats by name, with measured figures of each. `ktft.native.packed` describes how their bytes are read.

This module imports the standard library only, because `ktft --help` loads it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FormatTraits:
    """The figures of a format that planning and verifying use.

    Attributes:
        error: the relative RMS error of Gaussian weights; see docs/reference/formats.md.
        error_limit: the largest relative RMS error that an expert's projection may have. It is 1.5 times the error of
            heavy-tailed weights (Student t5), and more for a format that has one scale per row.
        speed: the speed of the products as a share of int8's at the same shape. Decoding 4 bits takes longer; how much
            longer is estimated from the cases of few tokens, where decoding is the bottleneck of both.
        released: whether models are released with all of their linear weights in it, but the output layer's.
    """

    error: float
    error_limit: float
    speed: float
    released: bool = False


FORMAT_TRAITS = {
    "bf16": FormatTraits(error=0.0017, error_limit=0.005, speed=1.0),
    "int8": FormatTraits(error=0.0083, error_limit=0.04, speed=1.0),
    "fp8": FormatTraits(error=0.0264, error_limit=0.04, speed=0.95, released=True),
    "k4": FormatTraits(error=0.0767, error_limit=0.14, speed=0.85),
    "int4": FormatTraits(error=0.0822, error_limit=0.16, speed=0.9),
    "mxfp4": FormatTraits(error=0.115, error_limit=0.19, speed=0.9),
}
"""Each row is a format, in the order of the native core's `Format`."""
