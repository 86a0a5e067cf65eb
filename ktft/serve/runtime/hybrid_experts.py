"""Routed experts of hidden states on a GPU, for serving: the CPU's, residents beside them, and prefill in lanes.

A call with few tokens, decode, is work in the order of the stream: routing is split on the device between residents and
`HostExperts`, both compute, and the parts are added. Nothing waits and no shape depends on data, so CUDA graphs capture
it. A call with more tokens goes through the training step's lanes, which look at the routing and decide.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ktft.checkpoint.routing_profile import Routing
from ktft.config import Settings
from ktft.deferral import lowest
from ktft.lanes.gpu.lane import GpuLane
from ktft.lanes.lanes import Lanes
from ktft.lanes.layer import LanedExperts
from ktft.lanes.passes import Pass
from ktft.lora import ExpertLora
from ktft.native import ELSEWHERE, ExpertLayer
from ktft.native.hybrid import HostExperts
from ktft.serve.runtime.heat import Heat
from ktft.serve.runtime.resident_experts import HotExperts, HotLayer, operations
from ktft.serve.runtime.served_model import ServedModel
from ktft.serve.runtime.settings import ServeSettings
from ktft.system import readable

logger = logging.getLogger("ktft")

MAX_TOKENS = 32
"""Of a call that is captured in a CUDA graph: decode's largest batch."""
ADAPT_SECONDS = 2.0
ADAPT_BYTES = 64 << 20
"""What may change of the residents, and how often: about 1 ms of PCIe, 0.1% of its time."""
BESIDE = 4 << 30
"""Of GPU memory that `gpu_expert_memory: auto` leaves for activations and streamed experts, besides the KV cache."""


class HybridExperts:
    """One layer's routed experts.

    Args:
        model: whose layer it is.
        number: of the layer in the model.
        place: among the layers with experts.
        layer: the packed experts.
    """

    def __init__(self, model: HybridModel, number: int, place: int, layer: ExpertLayer) -> None:
        self.model, self.number, self.place, self.layer = model, number, place, layer
        self.lora: ExpertLora | None = None
        self._laned = LanedExperts(model.lanes, layer, number, "none", seen=self._seen)

    def __call__(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, valid: Tensor | None = None
    ) -> Tensor:
        """Weighted sum over the chosen experts, in the dtype of `hidden_states`.

        Args:
            hidden_states: `[T, H]` on the model's device, in its dtype.
            top_k_index: `[T, k]` int32 or int64; top_k_weights: `[T, k]` float.
            valid: `[T]` bool: False for padding, whose output is zero. Without it padding is computed like all else.

        Raises:
            ValueError: more than `max_tokens` while a CUDA graph is captured; with more tokens an expert number out of
                range, or NaN or Inf in hidden states. `HostExpertsError`: a call before this one failed.
        """
        tokens = len(hidden_states)
        if tokens <= self.model.max_tokens:
            if valid is not None:
                top_k_index = top_k_index.masked_fill(~valid[:, None], ELSEWHERE)
            return self._few(hidden_states.contiguous(), top_k_index.contiguous(), top_k_weights.float().contiguous())
        if self.model.capturing():
            raise ValueError(
                f"{self.layer.name}: a CUDA graph of {tokens} tokens is captured, the experts take graphs of at most "
                f"{self.model.max_tokens}; limit cudagraph_capture_sizes to that, or raise max_tokens"
            )
        if valid is None:
            return self._many(hidden_states, top_k_index, top_k_weights)
        out, rows = torch.zeros_like(hidden_states), valid.nonzero().flatten()
        out[rows] = self._many(hidden_states[rows], top_k_index[rows], top_k_weights[rows])
        return out

    def _few(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if not len(hidden):
            return torch.empty_like(hidden)
        model, host, stream = self.model, self.model.host, self.model.stream()
        hot, away, blocks = model.hot_layer(self.place), index, index
        if hot is not None:
            blocks, away = model.ops.route(hot, index)
        late = None
        if model.defers(self.place):
            light = lowest(weights, model.deferral)
            late, away = away.masked_fill(~light, ELSEWHERE), away.masked_fill(light, ELSEWHERE)
        host.submit(self.layer, hidden, away, weights, slot=0, stream=stream)
        parts = [] if hot is None else [model.ops.forward(hot, hidden, blocks, weights)]
        owed = model.take_owed(self.place, len(hidden))
        if owed is not None:
            parts.append(host.wait(owed, len(hidden), slot=1, stream=stream))
        if late is not None:
            host.submit(self.layer, hidden, late, weights, slot=1, stream=stream)
            model.owe(self.layer, len(hidden))
        parts.append(host.wait(self.layer, len(hidden), slot=0, stream=stream))
        return _sum(parts, hidden.dtype)

    def _many(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        if self.place == 0:
            self.model.between_steps()
        with torch.no_grad():
            out = self._laned(self.model.running, hidden, index.long(), weights, self.lora)
        if self.place == 0:
            self.model.host.check()  # the lanes have waited for all that was queued before them
        if self.place == len(self.model.layers) - 1:
            self.model.lanes.end_step()
        return out

    def _seen(self, run: Pass, counts: Sequence[int]) -> None:
        self.model.heat.add(self.place, run, counts)


def _sum(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Added in fp32."""
    total = parts[0]
    for part in parts[1:]:
        total = total.float() + part
    return total.to(dtype)


class HybridModel(ServedModel):
    """All routed experts of a process whose hidden states are on a GPU; a `ServedModel` otherwise.

    GPU memory is taken here, before an engine measures what is left for its KV cache; call `warm_up` before that too.

    Args:
        layers: by their numbers in the model; all of one runtime, sizes and format.
        device: of hidden states; on the CPU its torch stands in for the GPU.
        top_k, dtype: of every call.
        max_tokens: of a call without a look at the routing, and so of a CUDA graph.
        gpu_expert_memory: bytes for residents, their adapters included; or `auto`, half of what is free now, less
            `BESIDE`.
        max_lora_rank: of adapters to be served; 0 for none.
        placement: of calls with more tokens; see `ktft.config.Settings`, but not `resident`.
        routing: which experts are resident from the start; checked by `Routing.check`. Without, traffic decides.
        deferral: of a token's experts, so many that weigh least are added one layer later in decode.
        adaptive: residents follow traffic.
        activation_bits: of few tokens on the CPU; see `ExpertLayer.forward`.

    Attributes:
        layers: by number.
        decoding: whether all sequences of the step are in decode, so that experts may be deferred. By default
            while a CUDA graph is captured: serve with graphs of decode only.

    Raises:
        ValueError: `gpu_expert_memory` holds no expert, a deferral of all experts, or counts of another model.
    """

    def __init__(
        self,
        layers: Mapping[int, ExpertLayer],
        device: torch.device | str,
        *,
        top_k: int,
        dtype: torch.dtype,
        max_tokens: int = MAX_TOKENS,
        gpu_expert_memory: int | str = 0,
        max_lora_rank: int = 0,
        placement: str = "auto",
        routing: Routing | None = None,
        deferral: int = 0,
        adaptive: bool = True,
        activation_bits: int = 16,
    ) -> None:
        if not 0 <= deferral < top_k:
            raise ValueError(
                f"deferral is {deferral}; a token has {top_k} experts, of which one at least must be on time"
            )
        self.device, self.max_tokens, self.deferral, self.adaptive = (
            torch.device(device),
            max_tokens,
            deferral,
            adaptive,
        )
        self.top_k, self.dtype = top_k, dtype
        ordered = [layers[number] for number in sorted(layers)]
        runtime, hidden = ordered[0].runtime, ordered[0].hidden_size
        super().__init__({}, runtime)
        self.host = HostExperts(
            runtime,
            self.device,
            max_tokens=max_tokens,
            hidden_size=hidden,
            top_k=top_k,
            dtype=dtype,
            slots=2,
            activation_bits=activation_bits,
        )
        self.lanes = Lanes(Settings(placement=placement), on_cpu=self.device.type == "cpu")
        self.lanes.layers.extend(ordered)
        running = self.lanes.on(self.device)
        assert running is not None
        self.running = running
        self.ops = operations(self.device)
        self.hot = self._residents(running.gpu, gpu_expert_memory, ordered, max_lora_rank)
        self.layers: dict[int, HybridExperts] = {  # type: ignore[assignment]
            n: HybridExperts(self, n, i, layers[n]) for i, n in enumerate(sorted(layers))
        }
        self.heat = Heat(ordered, self.host, self.hot, top_k)
        self.decoding: Callable[[], bool] = self.capturing
        self._owed: tuple[ExpertLayer, int] | None = None
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
    ) -> HybridModel:
        """As a server's settings have it.

        Raises:
            OSError, ValueError: the routing profile cannot be read, or is of another model; as the constructor.
        """
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
            max_lora_rank=settings.max_lora_rank,
            routing=routing,
            deferral=settings.deferral,
            activation_bits=settings.activation_bits,
        )

    def _residents(
        self, lane: GpuLane, memory: int | str, layers: Sequence[ExpertLayer], max_rank: int
    ) -> HotExperts | None:
        if memory == "auto":
            room = lane.transfer.free_bytes()
            memory = min(
                max(0, (room[0] - BESIDE) // 2) if room else 0, sum(layer.packed_bytes for layer in layers) * 2
            )
            if memory < max(layer.packed_bytes // layer.num_experts for layer in layers):
                logger.info("gpu_expert_memory: auto found no room for resident experts")
                return None
        if not memory:
            return None
        hot = HotExperts(lane, int(memory), layers, max_rank)
        logger.info("%s of GPU memory hold resident experts", readable(hot.bytes))
        return hot

    def warm_up(self, tokens: int = 512) -> None:
        """Take the memory that streaming needs, measure rates and make kernels, with made-up tokens."""
        first = next(iter(self.layers.values()))
        experts = first.layer.num_experts
        drawn: Any = {"device": self.device, "generator": torch.Generator(self.device).manual_seed(0)}
        for count, dtype in ((1, torch.int32), (1, torch.int64), (max(tokens, self.max_tokens + 1), torch.int64)):
            hidden = torch.randn(count, first.layer.hidden_size, **drawn).to(self.dtype)
            index = torch.rand(count, experts, **drawn).argsort(1)[:, : self.top_k].to(dtype)
            first(hidden, index, torch.full(index.shape, 1 / self.top_k, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.lanes.end_step()
        self.heat.clear()

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def stream(self) -> int:
        """Raw handle of the current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream) if self.device.type == "cuda" else 0

    def hot_layer(self, place: int) -> HotLayer | None:
        """The layer's residents; None where no memory was given to any."""
        return None if self.hot is None else self.hot.layers[place]

    def defers(self, place: int) -> bool:
        """Whether a layer's lightest experts are added by the next one: the last one has none after it."""
        return self.deferral > 0 and place < len(self.layers) - 1 and self.decoding()

    def owe(self, layer: ExpertLayer, tokens: int) -> None:
        """The next layer is to add what this one deferred."""
        self._owed = layer, tokens

    def take_owed(self, place: int, tokens: int) -> ExpertLayer | None:
        """The layer before, if it deferred something.

        Raises:
            RuntimeError: it did for another number of tokens: layers of two batches came interleaved.
        """
        owed, self._owed = self._owed, None
        if owed is None or place == 0:
            return None
        if owed[1] != tokens:
            raise RuntimeError(f"{owed[0].name} deferred experts of {owed[1]} tokens, the next layer has {tokens}")
        return owed[0]

    def between_steps(self) -> None:
        """No layer is at work on the host: let residents follow the traffic, every `ADAPT_SECONDS`.

        Called before each prefill; an engine may call it, and `check`, after each step.
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
        """Raise what the CPU's experts met; after a step whose stream was synchronized. Its output is wrong then."""
        self.host.check()

    def set_lora(self, lora: Mapping[int, ExpertLora] | None, adapter: Mapping[str, Any] | None = None) -> None:
        """Give the layers, by number, other adapters; those not named get none. All at once, captured graphs included.

        Nothing may be at work: drain first.

        Args:
            adapter: what is known of it, for `status`.

        Raises:
            ValueError: a layer that does not exist, or adapters that do not fit; then the old ones stay.
        """
        loras = dict(lora or {})
        odd = sorted(loras.keys() - self.layers.keys())
        if odd:
            raise ValueError(f"the adapter has experts of layer {odd[0]}, where the model has none")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        before = {number: experts.lora for number, experts in self.layers.items()}
        try:
            self._set(loras)
        except Exception:
            self._set({number: old for number, old in before.items() if old is not None})
            raise
        self.adapter = None if lora is None else adapter

    def _set(self, loras: Mapping[int, ExpertLora]) -> None:
        if self.hot is not None:
            self.hot.set_lora({e.place: loras[n] for n, e in self.layers.items() if n in loras})
        for number, experts in self.layers.items():
            self.host.set_lora(experts.layer, loras.get(number))
            experts.lora = loras.get(number)

    def routing(self) -> Routing:
        """What was counted so far, as a profile for the next start. Waits for the device."""
        return Routing(dict(zip(self.layers, self.heat.totals(), strict=True)))

    def work(self) -> dict[str, Any]:
        """As of `ServedModel`, with residents and deferral. Waits for the device."""
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
        """Give threads and locked memory back; no graph may be replayed after that."""
        self.host.close()
