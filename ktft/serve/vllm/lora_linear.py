"""LoRA on vLLM's linear layers, added to the product that vLLM computes.

vLLM makes and loads its model with its own method for linear layers. `add_slots` then gives each layer that can have
LoRA a `KtftLinearMethod`, before anything is compiled or captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)

from ktft.hosts.vllm import QUANT_METHOD
from ktft.serve.runtime.lora_linear import LoraLinear
from ktft.serve.runtime.placed_lora import PlacedLora
from ktft.serve.runtime.served_adapter import Slot, Target
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.runtime.step_adapters import StepAdapters

FORWARDS = (ReplicatedLinear.forward, ColumnParallelLinear.forward, RowParallelLinear.forward)
"""The forwards that call the layer's method, and with it LoRA. No other forward is known to."""

SHORTCUTS = {"DeepSeekV2FusedQkvAProjLinear": "_use_min_latency_gemm"}
"""Classes with a forward of their own, which bypasses the method only while this attribute is true."""

NO_SLOTS = "the server was started without room for an adapter; start it with --adapter or --adapter-swap"


class KtftLinearMethod(UnquantizedLinearMethod):
    """The product of the layer's own method, plus LoRA from the layer's slot."""

    def __init__(self, layer: Any, lora: LoraLinear | PlacedLora) -> None:
        super().__init__()
        self.base, self.lora = layer.quant_method, lora

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """What the layer's own method does once its weight has been read."""
        self.base.process_weights_after_loading(layer)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """From inputs `[..., input_size]` to outputs `[..., output_size]`."""
        return self.lora.add(x, self.base.apply(layer, x, bias))


def add_slots(model: nn.Module, config: VllmConfig, settings: ServeSettings, step: StepAdapters) -> None:
    """Give every linear layer that can have LoRA a slot. Raises ValueError for several processes."""
    if config.parallel_config.world_size > 1:
        raise ValueError(f"adapters are served by one process, not by {config.parallel_config.world_size}")
    left = absorbed(model)
    for name, layer in linear_layers(model):
        if name in left or refusal(layer):
            continue
        if flag := SHORTCUTS.get(type(layer).__name__):
            setattr(layer, flag, False)
        slot = Slot(layer.input_size, tuple(layer.output_partition_sizes))
        lora = (
            LoraLinear(layer.prefix, slot, step)
            if step.of_token is None
            else PlacedLora(layer, layer.prefix, slot, settings.max_lora_rank, settings.adapter_places, step)
        )
        QUANT_METHOD.put(layer, KtftLinearMethod(layer, lora))


def linear_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """vLLM's linear layers by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LinearBase)]


def slots_of(model: nn.Module) -> dict[str, Any]:
    """The slots of a model, by the layer's name."""
    methods = {name: layer.quant_method for name, layer in linear_layers(model)}
    return {name: method.lora for name, method in methods.items() if isinstance(method, KtftLinearMethod)}


def target_of(model: nn.Module, max_rank: int, experts: dict[int, tuple[int, int, int]]) -> Target:
    """Where the tensors of adapters go in a loaded model with slots. The arguments are those of `Target`."""
    slots, left = slots_of(model), absorbed(model)
    refused = {
        name: left.get(name) or refusal(layer) or NO_SLOTS for name, layer in linear_layers(model) if name not in slots
    }
    return Target(
        {name: lora.slot for name, lora in slots.items()},
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
