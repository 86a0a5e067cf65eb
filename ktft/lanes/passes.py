"""Passes of a model's layers through the lanes: where experts run, what that took, and what is learned from it."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ktft import spans
from ktft.lanes.decide.costs import LayerKind
from ktft.lanes.decide.placer import Placement, Placer
from ktft.lanes.decide.trial import TRIED, Choice
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.gpu.measure import measured_rates
from ktft.lanes.terms import PASSES, Lane, Mode, Where, Work
from ktft.lora import ExpertLora
from ktft.native import ExpertLayer

logger = logging.getLogger("ktft")

IDLE = 2e-3
"""The most seconds by which copies of experts that no token asked for may make a pass longer: about half of what it
takes the host to wait for the routing and to give the GPU its experts by it.
"""
DECIDED_AGAIN = 64
"""Of so many passes of a layer one is decided anew, even if all its experts stayed on the GPU before."""


@dataclass
class Pass:
    """One layer's experts going forward or backward in lanes, and what that took.

    Attributes:
        number: of the decoder layer.
        work: `FORWARD` or `BACKWARD`.
        counts: rows by expert.
        mode: how the experts were placed.
        prefetched: streamed experts whose copies began before the decision.
        began: when it was decided, by `time.perf_counter`.
        cpu_seconds: from then until the CPU is done.
        events: empty without a GPU. Otherwise the begin on the stream of copies and on that of products, then the end
            on each.
    """

    layer: ExpertLayer
    number: int
    work: Work
    counts: Sequence[int]
    placement: Placement
    placer: Placer
    lora: ExpertLora | None
    prefetched: int = 0
    mode: Mode = Mode.AUTO
    began: float = field(default_factory=time.perf_counter)
    cpu_seconds: float = 0.0
    events: list[Any] = field(default_factory=list)

    @property
    def on_gpu(self) -> list[int]:
        return self.placement.resident + self.placement.stream

    @property
    def _where_on_gpu(self) -> Where:
        """What the span of the GPU's products is called. A pass with both kinds of experts has only one such span."""
        return Where.STREAM if self.placement.stream else Where.RESIDENT

    def expect(self) -> None:
        """Note what the pass is expected to take, beside what its spans will measure."""
        seconds = self.placement.seconds
        gpu = max(seconds[Lane.COPY], seconds[Lane.GPU])
        spans.expect(self.number, {Where.CPU: seconds[Lane.CPU], self._where_on_gpu: gpu})

    def cpu_span(self, products: int) -> spans.Span:
        """A span for the CPU's experts, each of whose rows takes so many products."""
        return self._span(Where.CPU, self.placement.cpu, products, None)

    def gpu_span(self, products: int, stream: Any) -> spans.Span:
        return self._span(self._where_on_gpu, self.on_gpu, products, stream)

    def copy_span(self, stream: Any) -> spans.Span:
        """A span for the copies of streamed experts, without those that were prefetched."""
        copied = len(self.placement.stream) - self.prefetched
        return spans.device(
            "copy_in", self.number, stream, bytes=self.layer.packed_bytes * copied / self.layer.num_experts
        )

    def _span(self, where: Where, experts: list[int], products: int, stream: Any) -> spans.Span:
        layer, rows = self.layer, sum(map(self.counts.__getitem__, experts))
        return spans.device(
            where,
            self.number,
            stream,
            bytes=layer.packed_bytes * len(experts) / layer.num_experts,
            flops=2 * products * rows * layer.hidden_size * layer.intermediate_size,
        )


class Passes:
    """Decides where the experts of each pass of a model run, by what earlier passes took. `mode` is one of `Mode`.

    Only one thread may call at a time. `last` has each layer's last pass forward and backward since `forget`.
    """

    def __init__(self, lane: GpuLane, mode: str) -> None:
        self._lane, self._mode, self._choice = lane, mode, Choice()
        self._placers: dict[LayerKind, Placer] = {}
        self.last: dict[tuple[ExpertLayer, Work], Pass] = {}
        self._unread: deque[Pass] = deque()
        self._steady: Counter[ExpertLayer] = Counter()

    def begin(
        self, layer: ExpertLayer, number: int, counts: Sequence[int], top_k: int, lora: ExpertLora | None, work: Work
    ) -> Pass:
        """Decide where the experts of a pass run. `number` is the decoder layer's, `counts` are its rows by expert."""
        self._learn()
        placer, resident = self._placer(layer, top_k, lora), set(self._lane.held(layer))
        chosen = self._choice.mode(sum(counts) // top_k, lambda: _expected(placer, counts, resident))
        mode = chosen if placer.mode == Mode.AUTO else placer.mode
        coming = self._lane.coming(layer, lora)
        placement = placer.decide(counts, resident, work, mode, coming)
        now = Work.FORWARD if work == Work.BOTH else work
        return Pass(layer, number, now, counts, placement, placer, lora, coming.among(placement), mode)

    def stay_on_gpu(self, layer: ExpertLayer, tokens: int, lora: ExpertLora | None) -> bool:
        """Whether all of a layer's experts are to run on the GPU in a forward and its backward, as they did in the last
        pass that was decided; now and then one is decided again. Such passes need neither `begin` nor `end`.
        """
        before = self.last.get((layer, Work.FORWARD))
        if before is None or before.placement.cpu or not _alike(before.lora, lora):
            return False
        placer, counts, resident = before.placer, before.counts, self._lane.held(layer)
        mode = placer.mode
        if mode == Mode.AUTO:
            mode = self._choice.mode(tokens, lambda: _expected(placer, counts, set(resident)))
        if mode != before.mode:
            return False
        idle = sum(not count and expert not in resident for expert, count in enumerate(counts))
        copied = idle * layer.packed_bytes / layer.num_experts / placer.rates.copy_in
        self._steady[layer] = (self._steady[layer] + 1) % DECIDED_AGAIN
        return copied <= IDLE + before.placement.copies_hidden and self._steady[layer] > 0

    def again(self, before: Pass) -> Pass:
        """Begin the backward of a forward whose CPU lane retained what it needs: each expert runs where it ran."""
        coming = self._lane.coming(before.layer, before.lora)
        placement = before.placer.again(before.placement, before.counts, Work.BACKWARD, coming)
        given = before.layer, before.number, Work.BACKWARD, before.counts
        return Pass(*given, placement, before.placer, before.lora, coming.among(placement))

    def end(self, run: Pass) -> None:
        """Note a pass that has been given to its lanes. Once it is over, the rates learn from it."""
        self.last[run.layer, run.work] = run
        if run.events:
            self._unread.append(run)

    def forget(self) -> None:
        """Forget all passes, but keep what was learned from them."""
        self.last.clear()
        self._steady.clear()

    def begin_step(self) -> None:
        """A step of training begins; passes since the last one, such as those of evaluation, are not part of it."""
        self._choice.begin_step()

    def end_step(self) -> None:
        """The step is over; the choice of modes learns from its time."""
        self._choice.end_step()

    def _learn(self) -> None:
        """Correct the rates by passes that are over."""
        while self._unread and all(event.query() for event in self._unread[0].events):
            run = self._unread.popleft()
            copying, computing, copied, computed = run.events
            seconds = {Lane.CPU: run.cpu_seconds}
            expected = run.placement.expected
            # The slower of the two holds up the other, whose own time then says nothing
            if expected[Lane.COPY] >= expected[Lane.GPU]:
                seconds[Lane.COPY] = copying.elapsed_time(copied) / 1e3
            else:
                seconds[Lane.GPU] = computing.elapsed_time(computed) / 1e3
            run.placer.observe(run.work, run.placement, seconds)

    def _placer(self, layer: ExpertLayer, top_k: int, lora: ExpertLora | None) -> Placer:
        before = self.last.get((layer, Work.FORWARD))
        if before is not None and _alike(before.lora, lora) and before.placer.kind.top_k == top_k:
            return before.placer
        kind = LayerKind.of(layer, top_k, lora)
        if kind not in self._placers:
            began = time.perf_counter()
            rates = measured_rates(self._lane, layer, kind, lora)
            logger.info("experts' lanes, measured in %.1f s: %s", time.perf_counter() - began, rates)
            self._placers[kind] = Placer(kind, rates, self._mode)
        return self._placers[kind]


def _expected(placer: Placer, counts: Sequence[int], resident: set[int]) -> dict[Mode, float]:
    """Seconds of a layer's forward and backward in each mode."""
    return {
        mode: sum(max(placer.decide(counts, resident, work, mode).seconds.values()) for work in PASSES)
        for mode in TRIED
    }


def _alike(before: ExpertLora | None, now: ExpertLora | None) -> bool:
    """Whether the adapters have the same tensors."""
    if before is None or now is None:
        return before is now
    return [id(tensor) for tensor in before.parameters()] == [id(tensor) for tensor in now.parameters()]
