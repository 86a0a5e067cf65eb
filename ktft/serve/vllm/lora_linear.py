"""LoRA of one adapter on vLLM's linear layers, added to the product that vLLM computes.

vLLM makes and loads its model with its own method for linear layers. `add_slots` then gives each layer that can have
LoRA a `KtftLinearMethod`, before anything is compiled or captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from ktft.hosts.vllm import QUANT_METHOD
from ktft.serve.runtime.served_adapter import SliceLora, Slot, Target
from ktft.serve.runtime.swap import AB

A, B = "ktft_lora_a", "ktft_lora_b"
"""Buffers of a layer with a slot: fp32 `[parts * rank, input_size]` and `[output_size, rank]`. B has the scaling."""

FORWARDS = (ReplicatedLinear.forward, ColumnParallelLinear.forward, RowParallelLinear.forward)
"""The forwards that call the layer's method, and with it LoRA. No other forward is known to."""

SHORTCUTS = {"DeepSeekV2FusedQkvAProjLinear": "_use_min_latency_gemm"}
"""Classes with a forward of their own, which bypasses the method only while this attribute is true."""

NO_SLOTS = "the server was started without room for an adapter; start it with --adapter or --adapter-swap"


class KtftLinearMethod(UnquantizedLinearMethod):
    """The product of the layer's own method, plus B (A x) for every part of the output. It is a
    `ktft.serve.runtime.swap.LinearSlot`.

    LoRA takes x in fp32, the dtype in which PEFT holds adapters, and its sum with the product is rounded once.

    Args:
        layer: gets the buffers `A` and `B`.
        rank: the fixed rank of all parts. Code that was captured or compiled then finds another adapter in the same
            buffers, and zeros where there is none. None lets the rank follow the adapter, so that having none costs
            nothing.
    """

    def __init__(self, layer: Any, rank: int | None) -> None:
        super().__init__()
        self.layer, self.fixed, self.base = layer, rank, layer.quant_method
        self.slot = Slot(layer.input_size, tuple(layer.output_partition_sizes))
        self.rank = rank or 0
        self.device = next(layer.parameters()).device
        for name, tensor in zip((A, B), self.stacked([]), strict=True):
            layer.register_buffer(name, tensor.to(self.device), persistent=False)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """What the layer's own method does once its weight has been read."""
        self.base.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """From inputs `[..., input_size]` to outputs `[..., output_size]`."""
        out = self.base.apply(layer, x, bias)
        if not self.rank:
            return out
        low = linear(x.to(torch.float32), getattr(layer, A)).split(self.rank, dim=-1)
        for own, b, part in zip(
            low, getattr(layer, B).split(self.slot.parts), out.split(self.slot.parts, dim=-1), strict=True
        ):
            part.add_(linear(own, b))
        return out

    def stacked(self, slices: Sequence[SliceLora]) -> AB:
        """Zeros, or nothing where the rank follows the adapter, for no rows."""
        rank = self.fixed or max((len(each.a) for each in slices), default=0)
        bounds = self.slot.bounds
        a = torch.zeros(len(self.slot.parts) * rank, self.slot.input_size, dtype=torch.float32, device="cpu")
        b = torch.zeros(bounds[-1], rank, dtype=torch.float32, device="cpu")
        for each in slices:
            b[each.start : each.stop, : each.b.shape[1]] = each.b
            for part in range(bounds.index(each.start), bounds.index(each.stop)):
                a[part * rank : part * rank + len(each.a)] = each.a
        return a, b

    def ready(self, tensors: AB) -> AB:
        a, b = tensors
        return (a, b) if self.fixed else (a.to(self.device), b.to(self.device))

    def held(self) -> AB:
        a, b = getattr(self.layer, A), getattr(self.layer, B)
        return (a.to("cpu", copy=True), b.to("cpu", copy=True)) if self.fixed else (a, b)

    def put(self, tensors: AB) -> None:
        for name, tensor in zip((A, B), self.ready(tensors), strict=True):
            if self.fixed:
                getattr(self.layer, name).copy_(tensor)
            else:
                setattr(self.layer, name, tensor)
        self.rank = tensors[1].shape[1]


def add_slots(model: nn.Module, config: VllmConfig, max_rank: int) -> None:
    """Give every linear layer that can have LoRA a `KtftLinearMethod`. Raises ValueError for several processes."""
    if config.parallel_config.world_size > 1:
        raise ValueError(f"adapters are served by one process, not by {config.parallel_config.world_size}")
    compilation = config.compilation_config
    eager = compilation.mode == CompilationMode.NONE and compilation.cudagraph_mode == CUDAGraphMode.NONE
    left = absorbed(model)
    for name, layer in linear_layers(model):
        if name in left or refusal(layer):
            continue
        if flag := SHORTCUTS.get(type(layer).__name__):
            setattr(layer, flag, False)
        QUANT_METHOD.put(layer, KtftLinearMethod(layer, None if eager else max_rank))


def linear_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """vLLM's linear layers by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LinearBase)]


def slots_of(model: nn.Module) -> dict[str, Any]:
    """The layers that have a `KtftLinearMethod`, by name."""
    return {name: layer for name, layer in linear_layers(model) if isinstance(layer.quant_method, KtftLinearMethod)}


def target_of(model: nn.Module, max_rank: int, experts: dict[int, tuple[int, int, int]]) -> Target:
    """Where the tensors of adapters go in a loaded model with slots. The arguments are those of `Target`."""
    slots, left = slots_of(model), absorbed(model)
    refused = {
        name: left.get(name) or refusal(layer) or NO_SLOTS for name, layer in linear_layers(model) if name not in slots
    }
    return Target(
        {name: layer.quant_method.slot for name, layer in slots.items()},
        refused,
        dict(getattr(model, "packed_modules_mapping", {})),
        _renaming(model),
        max_rank,
        experts,
    )


def absorbed(model: nn.Module) -> dict[str, str]:
    """Layers whose weights attention multiplied into others while the model was loaded, by name, with the refusal."""
    layers = {id(module.kv_b_proj) for module in model.modules() if isinstance(module, MLAAttention)}
    reason = (
        "multi-head latent attention multiplies this layer's weights into others when the server loads them, unless "
        "VLLM_MLA_DISABLE=1 is in its environment, which takes a larger KV cache"
    )
    return {name: reason for name, layer in linear_layers(model) if id(layer) in layers}


def refusal(layer: Any) -> str | None:
    """Why LoRA on a layer would not be applied, or not always; None if it would."""
    kind = type(layer).__name__
    if kind not in SHORTCUTS and type(layer).forward not in FORWARDS:
        return f"vLLM's {kind} does not compute with its method alone"
    if not isinstance(layer.quant_method, UnquantizedLinearMethod):
        return f"vLLM computes it with {type(layer.quant_method).__name__}"
    return None


def _renaming(model: nn.Module) -> Callable[[str], str]:
    """From transformers' name of a module to vLLM's, as the model's weights are mapped, but without fusing layers."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    if "orig_to_new_stacked" in {field.name for field in fields(mapper)}:  # vLLM 0.32 has these rules; 0.24 has not
        mapper = replace(mapper, orig_to_new_stacked={})

    def rename(name: str) -> str:
        (renamed,) = mapper.apply_list([f"{name}.weight"]) or [f"{name}.weight"]
        return str(renamed).removesuffix(".weight")

    return rename
