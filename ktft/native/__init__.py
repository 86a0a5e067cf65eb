"""The interface to ktft's native core. It turns tensors into checked addresses, and native errors into ValueError.

Everything here takes and returns CPU tensors.
"""

from ktft.held import ELSEWHERE
from ktft.native.extension import FORMATS
from ktft.native.hybrid import HostExperts, HostExpertsError
from ktft.native.layer import ExpertLayer, Gradients, KeptLora
from ktft.native.machine import (
    LayerMemory,
    Runtime,
    StreamedMemory,
    check_machine,
    compute_ceilings,
    cpu_features,
    default_isa,
    isas,
    kernels,
    layer_memory,
    packed_bytes,
    runtime,
    runtime_of,
    topology,
)

__all__ = [
    "ELSEWHERE",
    "FORMATS",
    "ExpertLayer",
    "Gradients",
    "HostExperts",
    "HostExpertsError",
    "KeptLora",
    "LayerMemory",
    "Runtime",
    "StreamedMemory",
    "check_machine",
    "compute_ceilings",
    "cpu_features",
    "default_isa",
    "isas",
    "kernels",
    "layer_memory",
    "packed_bytes",
    "runtime",
    "runtime_of",
    "topology",
]
