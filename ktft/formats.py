"""The expert formats by name, with what was measured of each. How their bytes are read, `ktft.native.packed` knows.

Standard library only: `ktft --help` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FormatTraits:
    """What planning and verifying expect of a format.

    Attributes:
        error: relative RMS error of Gaussian weights: docs/reference/formats.md.
        error_limit: no expert's projection may be further off. It is half again what heavy-tailed weights (Student t5)
            have, and more where a format has one scale a row.
        speed: of the products, as a share of int8's at the same shape. Decoding 4 bits takes longer; how much longer is
            a guess from the cases of few tokens, where both are bound by decoding.
    """

    error: float
    error_limit: float
    speed: float


FORMAT_TRAITS = {
    "bf16": FormatTraits(error=0.0017, error_limit=0.005, speed=1.0),
    "int8": FormatTraits(error=0.0083, error_limit=0.04, speed=1.0),
    "fp8": FormatTraits(error=0.0264, error_limit=0.04, speed=0.95),
    "k4": FormatTraits(error=0.0767, error_limit=0.14, speed=0.85),
    "int4": FormatTraits(error=0.0822, error_limit=0.16, speed=0.9),
    "mxfp4": FormatTraits(error=0.115, error_limit=0.19, speed=0.9),
}
"""One row for each format, in the order of the native core's `Format`."""
