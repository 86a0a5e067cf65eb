"""What the layers of a model share to run their experts in several lanes at once."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from ktft.config import Settings
from ktft.lanes.decide.costs import LayerKind
from ktft.lanes.decide.placer import Placement, Placer
from ktft.lanes.decide.trial import TRIED, Choice
from ktft.lanes.gpu.crossing import Crossing
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.gpu.measure import measured_rates
from ktft.lanes.gpu.residents import Residents, free_for_residents
from ktft.lanes.kept import KeptOutputs
from ktft.lanes.terms import PASSES, Lane, Mode, Work
from ktft.lora import ExpertLora
from ktft.native import ELSEWHERE, ExpertLayer
from ktft.system import readable

logger = logging.getLogger("ktft")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class Pass:
    """One layer's experts going forward or backward in lanes, and what that took.

    Attributes:
        set_out: streamed experts whose copies began before the decision.
        cpu_seconds: from the decision until the CPU is done.
        events: on the stream of copies, then on that of products: begin and end of each, where there is a GPU.
    """

    layer: ExpertLayer
    work: Work
    placement: Placement
    placer: Placer
    lora: ExpertLora | None
    set_out: int = 0
    began: float = field(default_factory=time.perf_counter)
    cpu_seconds: float = 0.0
    events: list[torch.cuda.Event] = field(default_factory=list)

    @property
    def on_gpu(self) -> list[int]:
        """Experts that run on the GPU."""
        return self.placement.resident + self.placement.stream


class Lanes:
    """The lanes of one model, made when hidden states first come from a GPU.

    Any thread may call: what passes teach, and who is resident, is decided by one thread at a time.

    Args:
        settings: `placement` and `gpu_expert_memory`.
        on_cpu: run hidden states in CPU memory in lanes too, with the CPU's torch for a GPU: for tests.

    Attributes:
        layers: of the model, in the order of its layers.
        crossing: hidden states' way to host memory and back.
        gpu: the lanes on the GPU.
        residents: experts that stay there; None where none do.
        kept: outputs of its layers that wait for checkpointing's second forward, which a step does not leave behind.
    """

    crossing: Crossing
    gpu: GpuLane

    def __init__(self, settings: Settings, on_cpu: bool = False) -> None:
        self.layers: list[ExpertLayer] = []
        self.residents: Residents | None = None
        self.kept: weakref.WeakSet[KeptOutputs] = weakref.WeakSet()
        self._mutex = threading.RLock()
        self._owner = os.getpid()
        self._settings, self._on_cpu = settings, on_cpu
        self._device: torch.device | None = None
        self._placers: dict[LayerKind, Placer] = {}
        self._last: dict[tuple[ExpertLayer, Work], Pass] = {}
        self._unread: deque[Pass] = deque()
        self._counted: list[tuple[ExpertLayer, Sequence[int]]] = []
        self._choice = Choice()
        self._cpu = ThreadPoolExecutor(1, "ktft-cpu-lane")

    def take(self, device: torch.device) -> bool:
        """Whether experts of hidden states on this device run in lanes; makes these on first use.

        Raises:
            ValueError: lanes of another device exist.
            RuntimeError: this process was forked from the one that has the lanes.
        """
        if device.type != "cuda" and not self._on_cpu:
            return False
        if os.getpid() != self._owner:  # it has neither the CPU lane's thread nor the GPU, and locks may be held
            raise RuntimeError(
                f"this process ({os.getpid()}) was forked from the one that loaded the model ({self._owner}): it has "
                "neither its threads nor its GPU. Load the model in the process that computes with it, or start that "
                "process with multiprocessing's spawn method"
            )
        with self._mutex:
            if self._device is None:
                self.crossing, self.gpu = Crossing(device), GpuLane(device)
                self._device = device
        if device != self._device:
            raise ValueError(
                f"routed experts got hidden states on {device}, after others on {self._device}; load the model on one "
                'GPU, with a device_map such as {"": 0}'
            )
        return True

    def needs_cpu(self, layer: ExpertLayer) -> bool:
        """Whether the layer's next forward probably has work for the CPU, as its last one had."""
        before = self._last.get((layer, Work.FORWARD))
        return before is None or bool(before.placement.cpu)

    def submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Begin work on the CPU's own thread, which waits without holding up Python."""
        return self._cpu.submit(work, *args, **kwargs)

    def begin(self, layer: ExpertLayer, counts: Sequence[int], top_k: int, lora: ExpertLora | None, work: Work) -> Pass:
        """Decide where the experts of a pass run, by rows an expert."""
        with self._mutex:
            self._learn()
            placer = self._placer(layer, top_k, lora)
            resident = set(self.residents.slots(layer)) if self.residents is not None else set()
            chosen = self._choice.mode(sum(counts) // top_k, lambda: self._expected(placer, counts, resident))
            mode = chosen if placer.mode == Mode.AUTO else placer.mode
            coming = self.gpu.coming(layer, lora)
            placement = placer.decide(counts, resident, work, mode, coming)
        return Pass(
            layer, Work.FORWARD if work == Work.BOTH else work, placement, placer, lora, coming.among(placement)
        )

    @staticmethod
    def _expected(placer: Placer, counts: Sequence[int], resident: set[int]) -> dict[Mode, float]:
        def seconds(mode: Mode) -> float:
            return sum(max(placer.decide(counts, resident, work, mode).seconds.values()) for work in PASSES)

        return {mode: seconds(mode) for mode in TRIED}

    def again(self, before: Pass, counts: Sequence[int]) -> Pass:
        """The backward of a forward whose CPU lane retained what it needs: each expert where it was."""
        coming = self.gpu.coming(before.layer, before.lora)
        with self._mutex:
            placement = before.placer.again(before.placement, counts, Work.BACKWARD, coming)
        return Pass(before.layer, Work.BACKWARD, placement, before.placer, before.lora, coming.among(placement))

    @contextlib.contextmanager
    def timed(self, run: Pass) -> Iterator[None]:
        """Around what the GPU is given for a pass."""
        streams = [self.gpu.transfer.into, self.gpu.transfer.compute()] if self._device_is_cuda() else []
        for stream in streams:
            run.events.append(_event(stream))
        yield
        for stream in streams:
            run.events.append(_event(stream))

    def end(self, run: Pass, following: int) -> None:
        """A pass has been given to its lanes.

        Begins to copy experts that the next pass probably streams: that of the layer `following` places after this one.
        The last layer's backward follows its forward, and the next step begins with the first one's.
        """
        with self._mutex:
            self._last[run.layer, run.work] = run
            if run.events:
                self._unread.append(run)
            self._send_ahead(run, following)

    def _send_ahead(self, run: Pass, following: int) -> None:
        at = self.layers.index(run.layer) + following if run.layer in self.layers else -1
        if 0 <= at < len(self.layers):
            self._ahead(self.layers[at], Work.BACKWARD if following < 0 else run.work)
        elif run.layer in self.layers:
            self._ahead(run.layer, Work.BACKWARD if following > 0 else Work.FORWARD)

    def _ahead(self, layer: ExpertLayer, work: Work) -> None:
        before = self._last.get((layer, work))
        if before is not None and before.placement.ahead:
            self.gpu.prefetch(layer, before.placement.ahead, before.lora)

    def _learn(self) -> None:
        """Correct rates by passes that are over."""
        while self._unread and all(event.query() for event in self._unread[0].events):
            run = self._unread.popleft()
            copying, computing, copied, computed = run.events
            seconds = {Lane.CPU: run.cpu_seconds}
            expected = run.placement.expected
            # The slower of the two holds up the other, whose time then says nothing
            if expected[Lane.COPY] >= expected[Lane.GPU]:
                seconds[Lane.COPY] = copying.elapsed_time(copied) / 1e3
            else:
                seconds[Lane.GPU] = computing.elapsed_time(computed) / 1e3
            run.placer.observe(run.work, run.placement, seconds)

    def _placer(self, layer: ExpertLayer, top_k: int, lora: ExpertLora | None) -> Placer:
        before = self._last.get((layer, Work.FORWARD))
        if before is not None and _alike(before.lora, lora) and before.placer.kind.top_k == top_k:
            return before.placer
        kind = LayerKind.of(layer, top_k, lora)
        if kind not in self._placers:
            began = time.perf_counter()
            rates = measured_rates(self.gpu, layer, kind, lora)
            logger.info("experts' lanes, measured in %.1f s: %s", time.perf_counter() - began, rates)
            self._placers[kind] = Placer(kind, rates, self._settings.placement)
        return self._placers[kind]

    def _without_residents(self) -> str:
        return Mode.CPU if self._settings.placement == Mode.RESIDENT else self._settings.placement

    def _device_is_cuda(self) -> bool:
        return self._device is not None and self._device.type == "cuda"

    def observe(self, layer: ExpertLayer, counts: Sequence[int]) -> None:
        """Count a trained micro-batch's rows by expert: residents are chosen by them."""
        if self._settings.gpu_expert_memory != 0:
            with self._mutex:
                self._counted.append((layer, counts))

    def forget(self) -> None:
        """Go on as a run does that resumes here: with nothing on its way to the GPU, and no pass to foresee another by.

        What was sent ahead is multiplied first, so it has a say in the order of sums, and in their last bits.
        """
        with self._mutex:
            self._last.clear()
            if self._device is not None:
                self.gpu.forget()

    def begin_step(self) -> None:
        """A step of training begins: what went on since the last one, such as evaluation, has no part in its time."""
        with self._mutex:
            self._choice.begin_step()
            for kept in self.kept:  # of passes whose backward never came
                kept.clear()

    def end_step(self) -> None:
        """Between two steps: residents are made, or follow the routing; what the step took is learned from."""
        with self._mutex:
            self._end_step()

    def _end_step(self) -> None:
        self._choice.end_step()
        memory = self._settings.gpu_expert_memory
        if self._device is None or memory == 0:
            return
        if self.residents is None:
            budget = free_for_residents(self.gpu) if memory == "auto" else int(memory)
            if memory == "auto" and budget < max(layer.packed_bytes // layer.num_experts for layer in self.layers):
                logger.info("gpu_expert_memory: auto found no room for resident experts beside what training needs")
                self._settings = replace(self._settings, gpu_expert_memory=0, placement=self._without_residents())
                return
            self.residents = Residents(self.gpu, budget, self.layers)
            logger.info("%s of GPU memory hold resident experts", readable(self.residents.bytes))
        while self._counted:
            self.residents.observe(*self._counted.pop())
        self.residents.adapt()


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _alike(before: ExpertLora | None, now: ExpertLora | None) -> bool:
    """Whether the adapters have the same tensors."""
    if before is None or now is None:
        return before is now
    return [id(tensor) for tensor in before.parameters()] == [id(tensor) for tensor in now.parameters()]


def only(top_k_index: Tensor, experts: Sequence[int], num_experts: int) -> Tensor:
    """`[T, k]` with `ELSEWHERE` for all but these experts."""
    here = np.zeros(num_experts, dtype=bool)
    here[list(experts)] = True
    index = top_k_index.numpy()
    return torch.from_numpy(np.where(here[index], index, ELSEWHERE))
