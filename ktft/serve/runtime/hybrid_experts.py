"""Routed experts for serving with hidden states on a GPU: the CPU and resident experts decode, lanes compute prefill.

A call with few tokens, as in decode, is work in the order of the stream: the device divides the routing between
resident experts and `HostExperts`, both compute, and their parts are added. Nothing waits for the device and no shape
depends on data, so CUDA graphs can capture it. A call with more tokens goes through the lanes of a training step, which
look at the routing and decide where each expert runs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktft.checkpoint.routing_profile import Routing
from ktft.config import PROJECTIONS, Settings
from ktft.deferral import lowest
from ktft.device import device_of
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.lanes import Lanes
from ktft.lanes.layer import LanedExperts
from ktft.lora import ExpertLora, LoraPair
from ktft.native import ELSEWHERE, ExpertLayer
from ktft.native.hybrid import HostExperts
from ktft.serve.runtime.heat import Heat
from ktft.serve.runtime.resident_experts import HotExperts, handover, operations
from ktft.serve.runtime.served_model import ServedModel
from ktft.serve.runtime.settings import GRAPH_TOKENS, ServeSettings
from ktft.serve.runtime.step_adapters import BASE
from ktft.system import readable

logger = logging.getLogger("ktft")

ADAPT_SECONDS = 2.0
"""Seconds between two changes of the residents."""
ADAPT_BYTES = 64 << 20
"""Bytes of residents that one change may replace: about 1 ms of PCIe, so 0.1% of its time."""
BESIDE = 4 << 30
"""Bytes of GPU memory that `gpu_expert_memory: auto` leaves for activations and streamed experts, besides the KV
cache."""


class HybridExperts:
    """The routed experts of layer `number`, which is at `place` among the model's layers with experts.

    Attributes:
        loras: the layer's LoRA of each adapter, by the adapter's number.
    """

    def __init__(self, model: HybridModel, number: int, place: int, layer: ExpertLayer) -> None:
        self.model, self.place, self.layer = model, place, layer
        self.loras: dict[int, ExpertLora] = {}
        self._laned = LanedExperts(model.lanes, layer, number, "none", seen=partial(model.heat.add, place))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum over the chosen experts, in the dtype of `hidden_states`.

        Args:
            hidden_states: `[T, H]` on the model's device, in its dtype.
            top_k_index: `[T, k]` int32 or int64; top_k_weights: `[T, k]` float.

        Raises:
            ValueError: a CUDA graph of more than `max_tokens` is captured. In a call with more tokens: an expert number
                is out of range, or hidden states hold NaN or Inf.
            HostExpertsError: a call before this one failed.
        """
        tokens, step = len(hidden_states), self.model.step
        if tokens <= self.model.max_tokens:
            of_token = step.of_token[:tokens] if step.mixed and step.of_token is not None else None
            return self._few(hidden_states, top_k_index, top_k_weights, of_token)
        if self.model.capturing():
            raise ValueError(
                f"{self.layer.name}: a CUDA graph of {tokens} tokens is captured, the experts take graphs of at most "
                f"{self.model.max_tokens}; have the engine capture no larger ones, or raise max_tokens"
            )
        return self._many(hidden_states, top_k_index.long(), top_k_weights)

    def _few(self, hidden: Tensor, index: Tensor, weights: Tensor, of_token: Tensor | None) -> Tensor:
        if not len(hidden):
            return torch.empty_like(hidden)
        hidden, index, weights = hidden.contiguous(), index.contiguous(), weights.float().contiguous()
        model, host, device = self.model, self.model.host, device_of(self.model.device)
        stream = device.handle(device.current_stream())
        hot = None if model.hot is None else model.hot.layers[self.place]
        if model.handover is not None:
            place = host.place(self.layer, hidden, index, weights, of_token, stream=stream)
            mine = model.handover.send(hot, place, hidden, index, weights, of_token)
            adapters = of_token is not None
            host.submit_in_place(self.layer, len(hidden), index.dtype, adapters=adapters, stream=stream)
            part = None if hot is None or mine is None else model.ops.forward(hot, hidden, mine, weights, of_token)
            host.wait_in_place(self.layer, len(hidden), stream=stream)
            return model.handover.receive(place, part, hidden)
        blocks = away = index
        if hot is not None:
            blocks, away = model.ops.route(hot, index)
        late = None
        if model.defers(self.place):
            light = lowest(weights, model.deferral)
            late, away = away.masked_fill(~light, ELSEWHERE), away.masked_fill(light, ELSEWHERE)
        host.submit(self.layer, hidden, away, weights, of_token, slot=0, stream=stream)
        parts = [] if hot is None else [model.ops.forward(hot, hidden, blocks, weights, of_token)]
        owed = model.take_owed(self.place, len(hidden))
        if owed is not None:
            parts.append(host.wait(owed, len(hidden), slot=1, stream=stream))
        if late is not None:
            host.submit(self.layer, hidden, late, weights, of_token, slot=1, stream=stream)
            model.owed = self.layer, len(hidden)
        parts.append(host.wait(self.layer, len(hidden), slot=0, stream=stream))
        total = parts[0]
        for part in parts[1:]:
            total = total.float() + part
        return total.to(hidden.dtype)

    def _many(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if self.place == 0:
            self.model.between_steps()
        out = self._by_adapter(hidden, index, weights) if self.model.step.active else None
        if out is None:
            out = self.lane(hidden, index, weights)
        if self.place == 0:
            self.model.host.check()  # the lanes have waited for all work queued before them
        if self.place == len(self.model.layers) - 1:
            self.model.lanes.end_step()
        return out

    @torch.no_grad()
    def lane(self, hidden: Tensor, index: Tensor, weights: Tensor, lora: ExpertLora | None = None) -> Tensor:
        """The output, by the lanes of a training step. Arguments as of a call, with experts in int64."""
        return self._laned(self.model.running, hidden, index, weights, lora)

    def _by_adapter(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor | None:
        """The tokens of each adapter through the lanes, or, where they are few, together with those of others.

        None if no adapter of the step has LoRA on these experts.
        """
        step, most = self.model.step, self.model.max_tokens
        groups = step.groups(len(hidden), self.layer.name, self.loras)
        if [number for number, _ in groups] == [BASE]:
            return None
        if len(groups) == 1:
            return self.lane(hidden, index, weights, self.loras[groups[0][0]])
        out = torch.empty_like(hidden)
        for number, rows in groups:
            if len(rows) > most:
                out[rows] = self.lane(hidden[rows], index[rows], weights[rows], self.loras.get(number))
        few = [rows for _, rows in groups if len(rows) <= most]
        assert step.of_token is not None
        for rows in torch.cat(few).split(most) if few else ():
            out[rows] = self._few(hidden[rows], index[rows], weights[rows], step.of_token[rows])
        return out


class HybridModel(ServedModel):
    """All routed experts of a process whose hidden states are on a GPU.

    The constructor takes GPU memory, and so does `warm_up`: call both before the engine measures what is left for its
    KV cache.

    Args:
        layers: layer number -> its packed experts; all of one runtime, one format and the same sizes.
        device: the device of hidden states. With the CPU, its torch stands in for the GPU.
        top_k, dtype: experts of a token and dtype of hidden states, in every call.
        max_tokens: the largest call that is computed without a look at the routing, and so the largest CUDA graph.
        gpu_expert_memory: bytes for residents and their adapters; or `auto`: half of what is left of the free memory
            after `BESIDE`.
        max_lora_rank: the largest rank of adapters; 0 if none will be served.
        max_adapters: how many adapters may be served at once.
        step_tokens: the tokens of the largest step, to which adapters belong.
        placement: how calls with more tokens are placed; see `ktft.config.Settings`, but `resident` is not possible.
        routing: counts of tokens that choose the residents of the start. Without it, traffic chooses them.
        deferral: how many of a token's experts, those with the least weight, decode adds one layer later.
        adaptive: whether residents follow traffic.
        activation_bits: precision of activations on the CPU in calls with few tokens; see `ExpertLayer.forward`.
        dense_format: see `ServedModel`.

    Attributes:
        layers: layer number -> its experts.
        decoding: called to learn whether all sequences of the step are in decode, so that experts may be deferred. By
            default that is so while a CUDA graph is captured: serve with graphs of decode only.
        handover: what passes calls with few tokens to the CPU and back without copies, where that is possible.
        owed: the layer whose deferred experts the next one has to add, and the number of their tokens.

    Raises:
        ValueError: `gpu_expert_memory` holds no expert, `deferral` is as large as `top_k`, or `routing` was counted in
            another model.
    """

    def __init__(
        self,
        layers: Mapping[int, ExpertLayer],
        device: torch.device | str,
        *,
        top_k: int,
        dtype: torch.dtype,
        max_tokens: int = GRAPH_TOKENS,
        gpu_expert_memory: int | str = 0,
        max_lora_rank: int = 0,
        max_adapters: int = 1,
        step_tokens: int = 8192,
        placement: str = "auto",
        routing: Routing | None = None,
        deferral: int = 0,
        adaptive: bool = True,
        activation_bits: int = 16,
        dense_format: str | None = None,
    ) -> None:
        if not 0 <= deferral < top_k:
            raise ValueError(
                f"deferral is {deferral}; a token has {top_k} experts, of which one at least must be on time"
            )
        self.device, self.max_tokens, self.top_k, self.dtype = torch.device(device), max_tokens, top_k, dtype
        self.max_lora_rank = max_lora_rank
        self.deferral, self.adaptive = deferral, adaptive
        ordered = [layers[number] for number in sorted(layers)]
        runtime, hidden = ordered[0].runtime, ordered[0].hidden_size
        super().__init__({}, runtime, dense_format)
        self.host = HostExperts(
            runtime,
            self.device,
            max_tokens=max_tokens,
            hidden_size=hidden,
            top_k=top_k,
            dtype=dtype,
            activation_bits=activation_bits,
        )
        self.lanes = Lanes(Settings(placement=placement), on_cpu=self.device.type == "cpu")
        self.lanes.layers.extend(ordered)
        running = self.lanes.on(self.device)
        assert running is not None
        self.running = running
        self.ops = operations(self.device)
        self.handover = None if deferral else handover(self.device)
        if max_lora_rank:
            self.step.reserve(self.device, max(step_tokens, max_tokens), max_adapters)
        self.hot = self._residents(running.gpu, gpu_expert_memory, ordered, max_lora_rank, max_adapters)
        self.heat = Heat(ordered, self.host, self.hot, top_k)
        self.layers: dict[int, HybridExperts] = {  # type: ignore[assignment]
            n: HybridExperts(self, n, i, layers[n]) for i, n in enumerate(sorted(layers))
        }
        self.decoding: Callable[[], bool] = self.capturing
        self.owed: tuple[ExpertLayer, int] | None = None
        self._adapted = time.monotonic()
        if routing is not None:
            routing.check({number: layer.num_experts for number, layer in layers.items()}, "the routing profile")
            if self.hot is not None:
                self.hot.start({layers[number]: tokens for number, tokens in routing.tokens.items()})

    @classmethod
    def of(
        cls,
        settings: ServeSettings,
        layers: Mapping[int, ExpertLayer],
        device: torch.device | str,
        top_k: int,
        dtype: torch.dtype,
        step_tokens: int,
    ) -> HybridModel:
        """The model that a server's settings describe. It raises as the constructor, and OSError for a lost profile."""
        routing = None
        if settings.routing is not None:
            routing = Routing.load(Path(settings.routing))
            routing.check({number: layer.num_experts for number, layer in layers.items()}, settings.routing)
        return cls(
            layers,
            device,
            top_k=top_k,
            dtype=dtype,
            gpu_expert_memory=settings.gpu_expert_memory,
            max_lora_rank=settings.max_lora_rank if settings.adapter_slots else 0,
            max_adapters=settings.adapter_places,
            step_tokens=step_tokens,
            routing=routing,
            deferral=settings.deferral,
            activation_bits=settings.activation_bits,
            dense_format=settings.dense_format,
        )

    def _residents(
        self, lane: GpuLane, memory: int | str, layers: Sequence[ExpertLayer], max_rank: int, places: int
    ) -> HotExperts | None:
        if memory == "auto":
            room = device_of(self.device).free_bytes()
            spare = max(0, (room[0] - BESIDE) // 2) if room else 0
            memory = min(spare, 2 * sum(layer.packed_bytes for layer in layers))
            if memory < max(layer.packed_bytes // layer.num_experts for layer in layers):
                logger.info("gpu_expert_memory: auto found no room for resident experts")
                return None
        if not memory:
            return None
        hot = HotExperts(lane, int(memory), layers, max_rank, places)
        logger.info("%s of GPU memory hold resident experts", readable(hot.bytes))
        return hot

    def warm_up(self, tokens: int = 512) -> None:
        """Compute made-up tokens, which takes the memory for streaming, measures rates and compiles kernels."""
        first = next(iter(self.layers.values()))
        experts = first.layer.num_experts
        drawn: Any = {"device": self.device, "generator": torch.Generator(self.device).manual_seed(0)}
        calls = [(1, torch.int32, False), (1, torch.int64, False)]
        if self.step.of_token is not None:
            calls += [(1, torch.int32, True), (1, torch.int64, True)]
        for count, dtype, mixed in [*calls, (max(tokens, self.max_tokens + 1), torch.int64, False)]:
            hidden = torch.randn(count, first.layer.hidden_size, **drawn).to(self.dtype)
            index = torch.rand(count, experts, **drawn).argsort(1)[:, : self.top_k].to(dtype)
            self.step.mixed = mixed
            weights = torch.full(index.shape, 1 / self.top_k, device=self.device)
            first(hidden, index, weights)
        if self.max_lora_rank:
            first.lane(hidden, index, weights, _made_up(first.layer, self.max_lora_rank))
        device_of(self.device).synchronize()
        self.lanes.end_step()
        self.heat.clear()

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return device_of(self.device).is_current_stream_capturing()

    def defers(self, place: int) -> bool:
        """Whether the next layer adds this layer's lightest experts. The last layer has no next one."""
        return self.deferral > 0 and place < len(self.layers) - 1 and self.decoding()

    def take_owed(self, place: int, tokens: int) -> ExpertLayer | None:
        """The layer before this one, if it deferred experts.

        Raises:
            RuntimeError: it had another number of tokens, so the layers of two batches came interleaved.
        """
        owed, self.owed = self.owed, None
        if owed is None or place == 0:
            return None
        if owed[1] != tokens:
            raise RuntimeError(f"{owed[0].name} deferred experts of {owed[1]} tokens, the next layer has {tokens}")
        return owed[0]

    def between_steps(self) -> None:
        """Let residents follow the traffic, every `ADAPT_SECONDS`.

        Each prefill calls it first, and an engine may before each step. What changes on the device does so in the order
        of the current stream, behind the steps that it holds.
        """
        if self.hot is None:
            return
        self.hot.follow()
        if not self.adaptive:
            return
        counts = self.heat.arrived()
        if counts is not None:
            for hot, row in zip(self.hot.layers, counts, strict=True):
                self.hot.residents.observe(hot.layer, row)
            self.hot.adapt(ADAPT_BYTES)
        elif time.monotonic() - self._adapted >= ADAPT_SECONDS:
            self._adapted = time.monotonic()
            self.heat.ask()

    def check(self) -> None:
        """After the device has passed a step: raise what its CPU experts met; its output is wrong then."""
        self.host.check()

    def add_adapter(self, number: int, lora: dict[int, ExpertLora], adapter: Mapping[str, Any]) -> None:
        """As of `ServedModel`, but `lora` stays, for the lanes. Captured graphs compute the new adapter, too.

        Raises:
            ValueError: the model has no such layer, the adapter does not fit, or there are as many as there may be;
                then nothing has changed.
        """
        self._require_layers(lora)
        kept = {layer: self.layers[layer].layer.keep_lora(each) for layer, each in lora.items()}
        device_of(self.device).synchronize()
        place = self.step.take(number)
        try:
            self._set_residents(place, lora)
        except Exception:
            self.step.leave(number)
            raise
        for layer, packed in kept.items():
            experts = self.layers[layer]
            self.host.set_adapter(experts.layer, place, packed)
            experts.loras[number] = lora[layer]
        self.adapters[number] = adapter

    def remove_adapter(self, number: int) -> None:
        """As of `ServedModel`."""
        if number not in self.adapters:
            return
        device_of(self.device).synchronize()
        place = self.step.places[number]
        self._set_residents(place, {})
        for experts in self.layers.values():
            if experts.loras.pop(number, None) is not None:
                self.host.set_adapter(experts.layer, place, None)
        self.step.leave(number)
        del self.adapters[number]

    def _set_residents(self, place: int, lora: Mapping[int, ExpertLora]) -> None:
        if self.hot is not None:
            self.hot.set_adapter(place, {self.layers[layer].place: each for layer, each in lora.items()})

    def routing(self) -> Routing:
        """The counts so far, as a routing profile for the next start. Waits for the device."""
        return Routing(dict(zip(self.layers, self.heat.totals(), strict=True)))

    def work(self) -> dict[str, Any]:
        """As of `ServedModel`, and residents and deferral. Waits for the device."""
        residents = {}
        if self.hot is not None:
            slots = {n: self.hot.residents.slots(e.layer) for n, e in self.layers.items()}
            residents = {
                "bytes": self.hot.bytes,
                "moved": self.hot.residents.moved,
                "experts": {str(number): sorted(held) for number, held in slots.items()},
            }
        return {
            "lanes": self.heat.lanes(),
            "heat": {str(number): list(tokens) for number, tokens in self.routing().tokens.items()},
            "residents": residents,
            "deferral": self.deferral,
        }

    def close(self) -> None:
        """Release threads and locked memory. No graph may be replayed after that."""
        self.host.close()


def _made_up(layer: ExpertLayer, rank: int) -> ExpertLora:
    """LoRA of a layer that adds nothing."""
    sizes = {name: (layer.hidden_size, layer.intermediate_size) for name in PROJECTIONS[:2]}
    sizes[PROJECTIONS[2]] = (layer.intermediate_size, layer.hidden_size)
    zeros = partial(torch.zeros, dtype=torch.float32, device="cpu")
    return ExpertLora(
        {
            name: LoraPair(zeros(layer.num_experts, rank, inputs), zeros(layer.num_experts, outputs, rank), 1.0)
            for name, (inputs, outputs) in sizes.items()
        }
    )
