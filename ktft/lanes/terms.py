"""The words of this room. Each member equals the string that logs, reports and settings use for it."""

from __future__ import annotations

from enum import StrEnum

from ktft.config import PLACEMENTS


class Lane(StrEnum):
    """A resource that works beside the others.

    `CPU` runs the native kernels, `COPY` carries packed weights to the GPU over PCIe, `GPU` decodes and multiplies.
    """

    CPU = "cpu"
    COPY = "copy"
    GPU = "gpu"


class Work(StrEnum):
    """What a pass computes; `BOTH` is a forward whose backward will need what each lane retained."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


PASSES = (Work.FORWARD, Work.BACKWARD)
"""The two kinds of pass that have rates and costs of their own."""


class Where(StrEnum):
    """Where an expert's rows run: on the CPU, on the GPU after its weights were copied, or on the GPU with weights that
    stay there.
    """

    CPU = "cpu"
    STREAM = "stream"
    RESIDENT = "resident"


class Mode(StrEnum):
    """How experts are placed: `AUTO` follows the rates, the others force a place.

    Resident experts stay on the GPU except under `CPU`. `STREAM` streams all others, `RESIDENT` runs them on the CPU.
    """

    AUTO, CPU, STREAM, RESIDENT = PLACEMENTS
