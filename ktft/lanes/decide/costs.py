"""What a layer's experts cost in each lane: rates of a machine, and seconds that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ktft.lanes.terms import PASSES, Work
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer

FP32, BF16 = 4, 2

# Times that [T, H] crosses: hidden states out and the sum back; their gradient and hidden states out, a gradient back.
_CROSSINGS = {Work.FORWARD: (1, 1), Work.BACKWARD: (2, 1)}


@dataclass(frozen=True)
class LayerKind:
    """What layers of one shape and format have in common.

    Attributes:
        expert_bytes: of one packed expert.
        lora_parameters: of one expert, all projections; they travel in fp32.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    expert_bytes: int
    lora_parameters: int = 0

    @classmethod
    def of(cls, layer: ExpertLayer, top_k: int, lora: ExpertLora | None) -> LayerKind:
        """The kind of a packed layer with these adapters."""
        pairs = lora.pairs.values() if lora is not None else ()
        parameters = sum(pair.a[0].numel() + pair.b[0].numel() for pair in pairs)
        dims = layer.hidden_size, layer.intermediate_size
        return cls(layer.num_experts, top_k, *dims, layer.packed_bytes // layer.num_experts, parameters)

    @property
    def row_flops(self) -> float:
        """Base products of one row forward: what all FLOP/s here count, whatever else a pass does."""
        return 6.0 * self.hidden_size * self.intermediate_size


@dataclass(frozen=True)
class Rate:
    """One processor in one kind of work: FLOP/s of `LayerKind.row_flops`, bytes/s of packed weights read or decoded,
    and seconds of a call that does nothing else.
    """

    flops: float
    reading: float
    call: float


@dataclass(frozen=True)
class Rates:
    """One machine with one kind of layer: the CPU and the GPU by kind of work; bytes/s to the GPU and from it."""

    cpu: Mapping[Work, Rate]
    gpu: Mapping[Work, Rate]
    copy_in: float
    copy_out: float
    copy_call: float

    def __str__(self) -> str:
        """One line for the log."""
        cpu, gpu = ([each[work] for work in PASSES] for each in (self.cpu, self.gpu))
        return (
            f"CPU {cpu[0].flops / 1e12:.3g} and {cpu[1].flops / 1e12:.3g} TFLOPS forward and backward, "
            f"{cpu[0].reading / 1e9:.3g} GB/s; PCIe {self.copy_in / 1e9:.3g} GB/s; GPU {gpu[0].flops / 1e12:.3g} and "
            f"{gpu[1].flops / 1e12:.3g} TFLOPS, decodes {gpu[0].reading / 1e9:.3g} GB/s"
        )


class Costs(NamedTuple):
    """Seconds, of a call, an expert in use, a row, and a token whose hidden states cross for the CPU's sake."""

    cpu_call: float
    cpu_expert: float
    cpu_row: float
    copy_call: float
    copy_expert: float
    copy_resident: float
    gpu_call: float
    gpu_expert: float
    gpu_row: float
    cross: float
    cross_in: float

    def corrected(self, cpu: float, copy: float, gpu: float) -> Costs:
        """The same with every lane's seconds times a factor."""
        factors = (cpu, cpu, cpu, copy, copy, copy, gpu, gpu, gpu, cpu, copy)
        return Costs(*(cost * factor for cost, factor in zip(self, factors, strict=True)))


def costs(kind: LayerKind, rates: Rates, work: Work) -> Costs:
    """What one kind of layer costs.

    LoRA's parameters lie in CPU memory, so they travel for residents too; in backward their gradients come back, which
    the other direction of PCIe does meanwhile.
    """
    cpu, gpu = rates.cpu[work], rates.gpu[work]
    lora = kind.lora_parameters * FP32
    back = lora / rates.copy_out if work == Work.BACKWARD else 0.0
    out, into = (times * kind.hidden_size * BF16 for times in _CROSSINGS[work])
    return Costs(
        cpu_call=cpu.call,
        cpu_expert=kind.expert_bytes / cpu.reading,
        cpu_row=kind.row_flops / cpu.flops,
        copy_call=rates.copy_call,
        copy_expert=max((kind.expert_bytes + lora) / rates.copy_in, back),
        copy_resident=max(lora / rates.copy_in, back),
        gpu_call=gpu.call,
        gpu_expert=kind.expert_bytes / gpu.reading,
        gpu_row=kind.row_flops / gpu.flops,
        cross=out / rates.copy_out + into / rates.copy_in,
        cross_in=into / rates.copy_in,
    )
