"""What a layer's experts cost in each lane: the rates of a machine, and the seconds that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from ktft.lanes.terms import PASSES, Lane, Work
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer

Number = TypeVar("Number", float, NDArray[Any])

FP32, BF16 = 4, 2

# How often [T, H] crosses PCIe from and to the GPU. Forward: hidden states, and their sum back. Backward: the output's
# gradient and hidden states, and a gradient back.
_CROSSINGS = {Work.FORWARD: (1, 1), Work.BACKWARD: (2, 1)}


@dataclass(frozen=True)
class LayerKind:
    """What layers of one shape and format have in common."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    expert_bytes: int  # of one packed expert
    lora_parameters: int = 0  # of one expert, over all projections; they are copied in fp32
    projections: int = 3  # of one expert

    @classmethod
    def of(cls, layer: ExpertLayer, top_k: int, lora: ExpertLora | None) -> LayerKind:
        """The kind of a packed layer that has these adapters."""
        pairs = lora.pairs.values() if lora is not None else ()
        parameters = sum(pair.a[0].numel() + pair.b[0].numel() for pair in pairs)
        dims = layer.hidden_size, layer.intermediate_size
        each = layer.packed_bytes // layer.num_experts, parameters, len(layer.projections)
        return cls(layer.num_experts, top_k, *dims, *each)

    @property
    def row_flops(self) -> float:
        """FLOPs of one row's base products in forward. All FLOP/s here count these, whatever else a pass computes."""
        return 2.0 * self.projections * self.hidden_size * self.intermediate_size


@dataclass(frozen=True)
class Rate:
    """How fast one processor does one kind of work."""

    flops: float  # FLOP/s, counted as `LayerKind.row_flops`
    reading: float  # bytes/s of packed weights that are read (CPU) or decoded (GPU)
    call: float  # seconds that a call takes besides


@dataclass(frozen=True)
class Rates:
    """How fast one machine computes one kind of layer."""

    cpu: Mapping[Work, Rate]
    gpu: Mapping[Work, Rate]
    copy_in: float  # bytes/s to the GPU
    copy_out: float  # bytes/s from it
    copy_call: float  # seconds that a copy takes besides

    def __str__(self) -> str:
        cpu, gpu = ([each[work] for work in PASSES] for each in (self.cpu, self.gpu))
        return (
            f"CPU {cpu[0].flops / 1e12:.3g} and {cpu[1].flops / 1e12:.3g} TFLOPS forward and backward, "
            f"{cpu[0].reading / 1e9:.3g} GB/s; PCIe {self.copy_in / 1e9:.3g} GB/s; GPU {gpu[0].flops / 1e12:.3g} and "
            f"{gpu[1].flops / 1e12:.3g} TFLOPS, decodes {gpu[0].reading / 1e9:.3g} GB/s"
        )


class CpuCost(NamedTuple):
    """Seconds of the CPU lane: of a call, of reading an expert, of computing a row, and of a token whose hidden states
    leave the GPU and whose sum comes back.
    """

    call: float
    expert: float
    row: float
    cross: float

    def experts(self, rows: list[int]) -> list[float]:
        """Seconds of each expert with so many rows: the longer of reading and computing."""
        _, expert, row, _ = self
        few = int(expert / row)  # Python compares whole numbers sooner
        return [each * row if each > few else expert for each in rows]

    def seconds(self, every: float, elsewhere: Number, used: Number | bool, tokens: float) -> Number:
        """Seconds in all, if the lane is `used`: of `every` expert, less those of the ones that run `elsewhere`."""
        call, _, _, cross = self
        return (every + call + cross * tokens - elsewhere) * used


class CopyCost(NamedTuple):
    """Seconds of the copies to the GPU: of a call, of a streamed expert, of a resident one, which has only LoRA's
    parameters to copy, and of a token whose sum comes back from the CPU.
    """

    call: float
    expert: float
    resident: float
    cross: float

    def seconds(
        self, streamed: Number, resident: Number, arrived: Number, beside_cpu: Number | bool, tokens: float
    ) -> Number:
        """Seconds in all; the packed bytes of `arrived` of the streamed experts have been copied already."""
        call, expert, other, cross = self
        travel = streamed * expert + resident * other - arrived * (expert - other)
        return travel + (travel > 0) * call + beside_cpu * (cross * tokens)


class GpuCost(NamedTuple):
    """Seconds of decoding and products: of a call, of an expert, and of a row."""

    call: float
    expert: float
    row: float

    def seconds(self, experts: Number, used: Number | bool) -> Number:
        """Seconds in all, if the lane is `used`; `experts` are those of its experts."""
        return (experts + self.call) * used


class Costs(NamedTuple):
    """What each `Lane` costs, in their order."""

    cpu: CpuCost
    copy: CopyCost
    gpu: GpuCost

    def corrected(self, factors: Mapping[Lane, float]) -> Costs:
        """The same with every lane's seconds times its factor."""
        lanes: Iterable[Any] = zip(self, factors.values(), strict=True)
        return Costs._make(lane._make(cost * factor for cost in lane) for lane, factor in lanes)

    def plus(self, other: Costs) -> Costs:
        lanes: Iterable[Any] = zip(self, other, strict=True)
        return Costs._make(mine._make(map(add, mine, theirs)) for mine, theirs in lanes)


def costs(kind: LayerKind, rates: Rates, work: Work) -> Costs:
    """What one kind of layer costs.

    LoRA's parameters are in CPU memory, so residents need copies too. In backward their gradients come back, which
    takes the other direction of PCIe at the same time.
    """
    cpu, gpu = rates.cpu[work], rates.gpu[work]
    lora = kind.lora_parameters * FP32
    back = lora / rates.copy_out if work == Work.BACKWARD else 0.0
    out, into = (times * kind.hidden_size * BF16 for times in _CROSSINGS[work])
    return Costs(
        CpuCost(
            call=cpu.call,
            expert=kind.expert_bytes / cpu.reading,
            row=kind.row_flops / cpu.flops,
            cross=out / rates.copy_out + into / rates.copy_in,
        ),
        CopyCost(
            call=rates.copy_call,
            expert=max((kind.expert_bytes + lora) / rates.copy_in, back),
            resident=max(lora / rates.copy_in, back),
            cross=into / rates.copy_in,
        ),
        GpuCost(call=gpu.call, expert=kind.expert_bytes / gpu.reading, row=kind.row_flops / gpu.flops),
    )
