"""The routed experts that a server computes, whatever the engine: one `ServedModel` in a process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ktft.lora import ExpertLora
from ktft.native import ExpertLayer, KeptLora, Runtime
from ktft.native.decoder import MoeBlock
from ktft.native.dense import HostDense
from ktft.serve.runtime.step_adapters import StepAdapters

UNCOUNTED = 1024
"""Pairs of tokens and experts that are counted together, since counting few takes as long."""


class ServedExperts:
    """One layer's routed experts, without gradients, with an adapter for each token.

    Attributes:
        activation_bits: see `ktft.native.ExpertLayer.forward`.
        kept: the LoRA of each adapter, by the adapter's number.
        step: which of these each token has.
    """

    def __init__(self, layer: ExpertLayer, activation_bits: int = 16) -> None:
        self.layer, self.activation_bits = layer, activation_bits
        self.kept: dict[int, KeptLora] = {}
        self.step = StepAdapters()
        self._heat = torch.zeros(layer.num_experts, dtype=torch.int64, device="cpu")
        self._uncounted: list[Tensor] = []
        self._seconds = 0.0
        self._block: MoeBlock | None = None

    def behind(self, router: HostDense, top_k: int, renormalize: bool) -> MoeBlock:
        """These experts behind their router, for steps without adapters. Its work counts as theirs."""
        self._block = MoeBlock(router, self.layer, top_k, renormalize, self._heat, self.activation_bits)
        return self._block

    def adapters_of_step(self) -> list[int]:
        """The adapters that tokens of the step have on these experts."""
        return [number for number in self.step.active if number in self.kept]

    @property
    def seconds(self) -> float:
        """The time that they took."""
        return self._seconds + (self._block.seconds if self._block else 0.0)

    @property
    def heat(self) -> Tensor:
        """`[num_experts]` int64, the (token, expert) pairs of each expert since the start."""
        if self._uncounted:
            chosen, self._uncounted = torch.cat([each.flatten() for each in self._uncounted]), []
            self._heat += torch.bincount(chosen[chosen >= 0], minlength=len(self._heat))
        return self._heat

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """From hidden states `[T, H]`, experts `[T, k]` and routing weights `[T, k]` to `[T, H]` in the input's dtype.

        Raises:
            ValueError: a shape or dtype is wrong, an expert number is out of range, or hidden states hold NaN or Inf.
        """
        if hidden_states.device.type != "cpu":
            raise ValueError(f"{self.layer.name}: hidden states are on {hidden_states.device}; they must be on the CPU")
        begin = time.perf_counter()
        inputs, bits = (hidden_states, top_k_index, top_k_weights), self.activation_bits
        if here := self.adapters_of_step():
            numbers = self.step.of_rows(len(hidden_states), self.layer.name)
            of = torch.full_like(numbers, -1, dtype=torch.int32)
            for place, number in enumerate(here):
                of[numbers == number] = place
            out = self.layer.forward_adapters(*inputs, [self.kept[number] for number in here], of, bits)
        else:
            out, _ = self.layer.forward(*inputs, None, "none", activation_bits=bits)
        self._seconds += time.perf_counter() - begin
        self._uncounted.append(top_k_index)
        if len(self._uncounted) * top_k_index.numel() >= UNCOUNTED:
            _ = self.heat
        return out


class ServedModel:
    """All routed experts of a process, by layer number, and the threads that compute them.

    Attributes:
        dense_format: the format of the linear weights around the experts; None for the model's dtype.
        adapters: what is known of each adapter that tokens may have, as values of JSON, by its number.
        step: which adapter each token has.
    """

    def __init__(self, layers: Mapping[int, ServedExperts], runtime: Runtime, dense_format: str | None = None) -> None:
        self.layers, self.runtime, self.dense_format = dict(layers), runtime, dense_format
        self.adapters: dict[int, Mapping[str, Any]] = {}
        self.step = StepAdapters()
        for experts in self.layers.values():
            experts.step = self.step

    def add_adapter(self, number: int, lora: dict[int, ExpertLora], adapter: Mapping[str, Any]) -> None:
        """Let tokens have another adapter, by this number, beside those that are there. Nothing may be computing.

        Args:
            number: above 0, and never given before.
            lora: by layer number; it is emptied, for the layers keep packed copies. Other layers compute the base.
            adapter: for `status`.

        Raises:
            ValueError: the model has no such layer, or the adapter does not fit; then nothing has changed.
        """
        self._require_layers(lora)
        kept = {layer: self.layers[layer].layer.keep_lora(lora.pop(layer)) for layer in sorted(lora)}
        for layer, packed in kept.items():
            self.layers[layer].kept[number] = packed
        self.adapters[number] = adapter

    def remove_adapter(self, number: int) -> None:
        """Take an adapter out, if it is there. Nothing may be computing."""
        for experts in self.layers.values():
            experts.kept.pop(number, None)
        self.adapters.pop(number, None)

    def _require_layers(self, lora: Mapping[int, ExpertLora]) -> None:
        odd = sorted(lora.keys() - self.layers.keys())
        if odd:
            raise ValueError(f"the adapter has expert LoRA for layer {odd[0]}, which has no routed experts here")

    def sizes(self) -> dict[int, tuple[int, int, int]]:
        """Layer number -> number of experts, hidden size, intermediate size."""
        layers = {number: experts.layer for number, experts in self.layers.items()}
        return {n: (layer.num_experts, layer.hidden_size, layer.intermediate_size) for n, layer in layers.items()}

    def status(self) -> dict[str, Any]:
        """What is served and what was computed since the start, for `/metrics`, as values of JSON.

        `lanes` has the (token, expert) pairs and the seconds of each lane, `heat` the (token, expert) pairs of each
        layer's experts.
        """
        layers = self.layers.values()
        first = next(iter(layers)).layer
        return {
            "adapters": [dict(each) for each in self.adapters.values()],
            "expert_format": first.format,
            "dense_format": self.dense_format,
            "isa": self.runtime.isa,
            "threads": self.runtime.threads,
            "numa_nodes": self.runtime.nodes,
            "packed_bytes": sum(experts.layer.packed_bytes for experts in layers),
            **self.work(),
        }

    def work(self) -> dict[str, Any]:
        """The part of `status` that changes with every step."""
        layers = self.layers.values()
        return {
            "lanes": {
                "cpu": {
                    "pairs": sum(int(experts.heat.sum()) for experts in layers),
                    "seconds": sum(experts.seconds for experts in layers),
                }
            },
            "heat": {str(number): experts.heat.tolist() for number, experts in sorted(self.layers.items())},
        }


_current: ServedModel | None = None


def serve(model: ServedModel) -> None:
    """Make this the process's `current` model."""
    global _current
    _current = model


def current() -> ServedModel:
    """The model whose experts this process computes. Raises RuntimeError if it has loaded none."""
    if _current is None:
        raise RuntimeError("this process has loaded no routed experts; the engine's worker process loads them")
    return _current
