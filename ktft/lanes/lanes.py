"""What the layers of a model share to run their experts in several lanes at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from ktft.config import Settings
from ktft.lanes.crossing import Crossing
from ktft.lanes.lane import GpuLane
from ktft.lanes.measure import measured_rates
from ktft.lanes.placement import Placement, Placer
from ktft.lanes.rates import LayerKind
from ktft.lanes.resident import Residents, free_for_residents
from ktft.lora import ExpertLora
from ktft.native import ELSEWHERE, ExpertLayer
from ktft.system import readable

logger = logging.getLogger("ktft")

P = ParamSpec("P")
R = TypeVar("R")


class Lanes:
    """The lanes of one model, made when hidden states first come from a GPU.

    Args:
        settings: `placement` and `gpu_expert_memory`.
        on_cpu: run hidden states in CPU memory in lanes too, with the CPU's torch for a GPU: for tests.

    Attributes:
        layers: of the model, in the order of its layers.
        crossing: hidden states' way to host memory and back.
        gpu: the lanes on the GPU.
        residents: experts that stay there; None where none do.
    """

    crossing: Crossing
    gpu: GpuLane

    def __init__(self, settings: Settings, on_cpu: bool = False) -> None:
        self.layers: list[ExpertLayer] = []
        self.residents: Residents | None = None
        self._settings, self._on_cpu = settings, on_cpu
        self._device: torch.device | None = None
        self._placers: dict[LayerKind, Placer] = {}
        self._cpu = ThreadPoolExecutor(1, "ktft-cpu-lane")

    def take(self, device: torch.device) -> bool:
        """Whether experts of hidden states on this device run in lanes; makes these on first use.

        Raises:
            ValueError: lanes of another device exist.
        """
        if device.type != "cuda" and not self._on_cpu:
            return False
        if self._device is None:
            self._device, self.crossing, self.gpu = device, Crossing(device), GpuLane(device)
        if device != self._device:
            raise ValueError(
                f"routed experts got hidden states on {device}, after others on {self._device}; load the model on one "
                'GPU, with a device_map such as {"": 0}'
            )
        return True

    def submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Begin work on the CPU's own thread, which waits without holding up Python."""
        return self._cpu.submit(work, *args, **kwargs)

    def count(self, layer: ExpertLayer, top_k_index: Tensor) -> list[int]:
        """Rows of each expert of `[T, k]` in host memory.

        Raises:
            ValueError: an expert number out of range.
        """
        flat = top_k_index.flatten()
        counts: list[int] = torch.bincount(flat.clamp_min(0), minlength=layer.num_experts).tolist()
        if len(counts) > layer.num_experts or bool((flat < 0).any()):
            wrong = int(flat[(flat < 0) | (flat >= layer.num_experts)][0])
            raise ValueError(
                f"{layer.name}: a token is routed to expert {wrong}, but the layer's experts are 0 to "
                f"{layer.num_experts - 1}"
            )
        return counts

    def place(
        self, layer: ExpertLayer, counts: Sequence[int], top_k: int, lora: ExpertLora | None, work: str
    ) -> Placement:
        """Decide where experts run; see `Placer.decide`."""
        resident = self.residents.slots(layer) if self.residents is not None else {}
        return self._placer(layer, top_k, lora).decide(counts, resident, work)

    def _placer(self, layer: ExpertLayer, top_k: int, lora: ExpertLora | None) -> Placer:
        parameters = sum(tensor[0].numel() for tensor in lora.parameters()) if lora is not None else 0
        kind = LayerKind(
            layer.num_experts,
            top_k,
            layer.hidden_size,
            layer.intermediate_size,
            layer.packed_bytes // layer.num_experts,
            parameters,
        )
        if kind not in self._placers:
            began = time.perf_counter()
            rates = measured_rates(self.gpu, layer, kind, lora)
            logger.info("experts' lanes, measured in %.1f s: %s", time.perf_counter() - began, rates)
            self._placers[kind] = Placer(kind, rates, self._settings.placement)
        return self._placers[kind]

    def observe(self, layer: ExpertLayer, counts: Sequence[int]) -> None:
        """Count a trained micro-batch's rows, by which residents are chosen."""
        if self.residents is not None:
            self.residents.observe(layer, counts)

    def end_step(self) -> None:
        """Between two steps: residents are made, or follow the routing."""
        memory = self._settings.gpu_expert_memory
        if self._device is None or memory == 0:
            return
        if self.residents is None:
            budget = free_for_residents(self.gpu) if memory == "auto" else int(memory)
            self.residents = Residents(self.gpu, budget, self.layers)
            logger.info("%s of GPU memory hold resident experts", readable(self.residents.bytes))
        else:
            self.residents.adapt()


def only(top_k_index: Tensor, experts: Sequence[int], num_experts: int) -> Tensor:
    """`[T, k]` with `ELSEWHERE` for all but these experts."""
    here = torch.zeros(num_experts, dtype=torch.bool)
    here[list(experts)] = True
    return top_k_index.masked_fill(~here[top_k_index], ELSEWHERE)
