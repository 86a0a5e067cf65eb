"""LoRA on SGLang's linear layers, added to the product that SGLang computes.

SGLang makes all its linear layers with `SglangLinearMethod`, which is SGLang's own until `add_slots` gives a loaded
layer its slot.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.linear import ColumnParallelLinear, LinearBase, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from torch import Tensor, nn

from ktft.serve.runtime.lora_linear import LoraLinear
from ktft.serve.runtime.placed_lora import PlacedLora
from ktft.serve.runtime.served_adapter import Slot, Target
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.runtime.step_adapters import StepAdapters

FORWARDS = (ReplicatedLinear.forward, ColumnParallelLinear.forward, RowParallelLinear.forward)
"""The forwards that call the layer's method, and with it LoRA. No other forward is known to."""

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""SGLang's fused layers, and what is in them. Its models have this in their `load_weights` only."""

NO_SLOTS = "the server was started without room for an adapter; start it with --adapter or --adapter-swap"


class SglangLinearMethod(UnquantizedLinearMethod):
    """SGLang's own method, plus LoRA if the layer has a slot.

    Attributes:
        lora: the layer's slot; None if there is no room for adapters, or the layer applies none.
    """

    # It writes the product where SGLang wants it, so LoRA would be lost. Without it SGLang calls `apply`.
    apply_into = None

    def __init__(self) -> None:
        super().__init__()
        self.lora: LoraLinear | PlacedLora | None = None

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """From inputs `[..., input_size]` to outputs `[..., output_size]`."""
        out: Tensor = super().apply(layer, x, bias)
        return out if self.lora is None else self.lora.add(x, out)


def add_slots(model: nn.Module, settings: ServeSettings, step: StepAdapters) -> None:
    """Give every linear layer that can have LoRA a slot."""
    for name, layer in linear_layers(model):
        if refusal(layer) is None:
            parts = getattr(layer, "output_partition_sizes", None) or [layer.output_size]
            slot = Slot(layer.input_size, tuple(parts))
            layer.quant_method.lora = (
                LoraLinear(name, slot, step)
                if step.of_token is None
                else PlacedLora(layer, name, slot, settings.max_lora_rank, settings.adapter_places, step)
            )


def linear_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """SGLang's linear layers by name."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LinearBase)]


def slots_of(model: nn.Module) -> dict[str, LoraLinear | PlacedLora]:
    """The slots of a model, by the layer's name."""
    methods = {name: layer.quant_method for name, layer in linear_layers(model)}
    return {name: each.lora for name, each in methods.items() if isinstance(each, SglangLinearMethod) and each.lora}


def target_of(model: nn.Module, max_rank: int, experts: dict[int, tuple[int, int, int]]) -> Target:
    """Where the tensors of adapters go in a loaded model with slots. The arguments are those of `Target`."""
    slots = slots_of(model)
    refused = {name: refusal(layer) or NO_SLOTS for name, layer in linear_layers(model) if name not in slots}
    sizes = {name: each.slot for name, each in slots.items()}
    return Target(sizes, refused, PACKED, lambda name: name, max_rank, experts)


def refusal(layer: Any) -> str | None:
    """Why LoRA on a layer would not be applied, or not always; None if it would."""
    if type(layer).forward not in FORWARDS:
        return f"SGLang's {type(layer).__name__} does not compute with its method alone"
    if not isinstance(layer.quant_method, SglangLinearMethod):
        return f"SGLang computes it with {type(layer.quant_method).__name__}"
    return None
