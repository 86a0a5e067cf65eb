"""Times a model's decoder layers without their routed experts, by running the model's own code on this machine."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from ktft import native
from ktft.adapters.linear import shorten
from ktft.device import ACCELERATORS, device_of
from ktft.model.experts import KtftExperts
from ktft.model.memory import torch_activations
from ktft.model.norms import fuse_norms
from ktft.model.rotary import fuse_rotary
from ktft.model.shape import ModelShape
from ktft.model.sinks import fuse_sinks
from ktft.model.workload import FP32, Workload
from ktft.plan.rates import LayerRate, affordable, medians, sizes_up_to
from ktft.system import available_memory, readable

_LARGEST = 4096  # tokens in a timed pass; the time of more tokens is scaled up by whole sequences
_MEMORY_SHARE = 0.5  # the share of available memory that timing may take


class _NoExperts(nn.Module):
    """A placeholder for routed experts that takes no time."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states.view_as(hidden_states)


class Untimed(Exception):
    """The layers cannot be timed on this machine; the message says why."""


def timed_layers(model: Any, shape: ModelShape, work: Workload, device: torch.device) -> LayerRate:
    """Time one decoder layer of each kind, with LoRA on its linear layers and without its routed experts.

    Args:
        model: a model on the meta device with empty `KtftExperts`; it is not changed.
        work: the recipe's step; sequences are timed at their full length unless a pass over them took many seconds.
        device: the device that runs the layers in training.

    Raises:
        Untimed: there is too little memory, or the model's code does not run without the rest of the model.
    """
    kinds: dict[str, list[int]] = {}
    for number, layer in enumerate(_stack(model).layers):
        kinds.setdefault(_kind(layer), []).append(number)
    batch = max(min(work.batch, _LARGEST // work.sequence), 1)
    _require_memory(shape, replace(work, batch=batch), device)
    forward = backward = 0.0
    least = batch * work.sequence
    for numbers in kinds.values():
        try:
            decoder = _decoder(model, numbers[0], work, device)
            tokens, seconds = _time(decoder, shape.hidden_size, batch, work, device)
        except Exception as error:  # third-party code runs on a part of the model and may raise anything
            raise Untimed(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
        scale = len(numbers) * work.batch * work.sequence / tokens
        forward, backward = forward + seconds[0] * scale, backward + seconds[1] * scale
        least = min(least, tokens)
    return LayerRate(forward, backward, least if least < work.sequence else None)


def _require_memory(shape: ModelShape, work: Workload, device: torch.device) -> None:
    gpu = device.type in ACCELERATORS
    weights = max(
        sum(linear.in_features * linear.out_features for linear in shape.linears if linear.layer == number)
        for number in range(shape.layers)
    )
    needed = 3 * weights * FP32 + torch_activations(replace(shape, layers=1, vocab_size=0), work, gpu=gpu)
    free = device_of(device).free_bytes()
    available = free[0] if free else available_memory()
    if needed > _MEMORY_SHARE * available:
        raise Untimed(f"it would take {readable(needed)} of memory, {readable(available)} are available")


def _stack(model: Any) -> Any:
    """The module with the list of decoder layers. A model that sees images may give one with a head as its decoder."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "layers") else decoder.model


def _kind(layer: nn.Module) -> str:
    """A key that is equal for layers that take the same time."""
    attributes = [getattr(module, "layer_type", None) or getattr(module, "sliding_window", None)
                  for module in (layer, getattr(layer, "self_attn", layer))]  # fmt: skip
    return str((attributes, [(name, tensor.shape) for name, tensor in layer.named_parameters()]))


def _decoder(model: Any, number: int, work: Workload, device: torch.device) -> nn.Module:
    """A copy of the decoder with layer `number` only, on `device`, with random weights and the recipe's LoRA."""
    decoder = copy.deepcopy(_stack(model))
    config, layers = decoder.config, decoder.config.num_hidden_layers
    for key, value in vars(config).items():  # lists with an item per layer, such as layer_types
        if isinstance(value, list) and len(value) == layers:
            setattr(config, key, [value[number]])
    config.num_hidden_layers = layers // len(decoder.layers)  # LongCat's layers count twice
    decoder.layers = nn.ModuleList([decoder.layers[number]])
    for name, module in list(decoder.named_modules()):
        if isinstance(module, KtftExperts):
            decoder.set_submodule(name, _NoExperts())
    decoder.set_input_embeddings(nn.Identity())
    dtype = torch.float32 if work.weight_bytes == FP32 else torch.bfloat16
    decoder.to_empty(device=device)
    for tensor in (*decoder.parameters(), *decoder.buffers()):
        if tensor.is_floating_point():
            tensor.data = torch.randn(tensor.shape, device=device).mul_(0.02).to(dtype)
        else:
            tensor.data.zero_()
    decoder.requires_grad_(False)
    targets = _adapted(decoder, number, work)
    if targets:
        rank = max(adapter.rank for adapter in work.elsewhere())
        inject_adapter_in_model(LoraConfig(r=rank, target_modules=targets), decoder)
        for name, parameter in decoder.named_parameters():
            if ".lora_" in name:
                parameter.data = parameter.data.float()
    fuse_norms(decoder, native.runtime)  # as training makes the layers
    if device.type in ACCELERATORS:
        shorten(decoder)
        fuse_rotary(decoder)
        fuse_sinks(decoder)
    return decoder.train()


def _adapted(decoder: nn.Module, number: int, work: Workload) -> list[str]:
    """Names of the decoder layer's linear layers whose sizes match those of a linear layer with LoRA."""
    sizes = {(a.in_features, a.out_features) for a in work.elsewhere() if a.layer == number}
    return [
        name
        for name, module in decoder.named_modules()
        if isinstance(module, nn.Linear) and (module.in_features, module.out_features) in sizes
    ]


def _time(
    decoder: nn.Module, hidden_size: int, batch: int, work: Workload, device: torch.device
) -> tuple[int, tuple[float, float]]:
    """How many tokens were timed, and the seconds of forward and backward over them."""
    dtype = torch.float32 if work.weight_bytes == FP32 else torch.bfloat16
    x = torch.randn(batch * work.sequence, hidden_size, device=device).to(dtype)

    def layer_of(tokens: int) -> _Layer:
        return _Layer(decoder, x[:tokens].view(-1, min(tokens, work.sequence), hidden_size), work)

    def once(layer: _Layer) -> tuple[float, float]:
        with _clock(device) as forward:
            layer.forward()
        with _clock(device) as backward:
            layer.backward()
        return forward[0], backward[0]

    sizes = dict.fromkeys([*sizes_up_to(work.sequence), batch * work.sequence])
    tokens = affordable(sizes, lambda size: sum(once(layer_of(size))))
    layer = layer_of(tokens)
    if work.recorded and device_of(device).records_graphs:
        layer.record(lambda: once(layer))
    return tokens, medians(lambda: once(layer))


class _Layer:
    """The only layer of a decoder, called as the decoder calls it, without what comes before and after.

    Args:
        x: the hidden states, `[batch, T, hidden_size]`.
    """

    def __init__(self, decoder: nn.Module, x: Tensor, work: Workload) -> None:
        self._layer: Any = cast(Any, decoder).layers[0]
        self._device, self._mixed = device_of(x.device), work.mixed
        self._x, self._args, self._kwargs = x, (), dict[str, Any]()
        hook = self._layer.register_forward_pre_hook(self._take, with_kwargs=True)
        with self._autocast(), torch.no_grad():
            decoder(inputs_embeds=x, use_cache=False)
        hook.remove()
        self._leaves = [self._x, *(each for each in self._layer.parameters() if each.requires_grad)]
        self._out: Tensor | None = None
        self._graphs: list[Any] = []

    def _take(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs["hidden_states"]  # some decoders make several streams of it
        self._x, self._args = given.detach().clone().requires_grad_(), args[1:]
        self._kwargs = {name: each for name, each in kwargs.items() if name != "hidden_states"}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._x.device.type, torch.bfloat16, enabled=self._mixed, cache_enabled=False)

    def forward(self) -> None:
        if self._graphs:
            self._graphs[0].replay()
            return
        with self._autocast():
            out = self._layer(self._x, *self._args, **self._kwargs)
        self._out = out if isinstance(out, Tensor) else out[0]

    def backward(self) -> None:
        if self._graphs:
            self._graphs[1].replay()
            return
        out, self._out = self._out, None  # what stays of a pass knows its stream, and a recording has its own
        assert out is not None
        torch.autograd.grad(out, self._leaves, torch.ones_like(out), allow_unused=True)

    def record(self, warm: Callable[[], object]) -> None:
        """From now on, play both passes back, as training does. A layer that cannot be recorded stays as it is."""
        warm()
        graphs, pool = [], self._device.graph_pool()
        for run in (self.forward, self.backward):
            graphs.append(self._device.new_graph(pool))
            graphs[-1].begin()
            try:
                run()
            except RuntimeError:
                with suppress(RuntimeError):
                    graphs[-1].end()
                return
            graphs[-1].end()
        self._graphs = graphs


@contextmanager
def _clock(device: torch.device) -> Iterator[list[float]]:
    """Yield a list that receives the block's duration in seconds when the block ends."""
    seconds: list[float] = []
    device_of(device).synchronize()
    start = time.perf_counter()
    yield seconds
    device_of(device).synchronize()
    seconds.append(time.perf_counter() - start)
