"""LoRA on vLLM's linear layers, added to the product that vLLM computes.

vLLM makes and loads its model with its own method for linear layers. `add_slots` then gives each layer that can have
LoRA a `KtftLinearMethod`, before anything is compiled or captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
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
from ktft.serve.runtime.step_adapters import StepAdapters
from ktft.serve.runtime.swap import AB

A, B = "ktft_lora_a", "ktft_lora_b"
"""Buffers of a layer with a slot: fp32 `[parts * rank, input_size]` and `[output_size, rank]`. B has the scaling."""

FORWARDS = (ReplicatedLinear.forward, ColumnParallelLinear.forward, RowParallelLinear.forward)
"""The forwards that call the layer's method, and with it LoRA. No other forward is known to."""

SHORTCUTS = {"DeepSeekV2FusedQkvAProjLinear": "_use_min_latency_gemm"}
"""Classes with a forward of their own, which bypasses the method only while this attribute is true."""

NO_SLOTS = "the server was started without room for an adapter; start it with --adapter or --adapter-swap"


FEW_ROWS = 64
"""Up to so many rows of several adapters, all adapters are applied to all rows, and what is not a row's own is masked.
With more rows that costs more than to gather those of each adapter."""


@dataclass(frozen=True)
class Shared:
    """LoRA of several adapters on one layer, side by side like one of all their ranks.

    Attributes:
        a: fp32 `[parts, ranks, input_size]`.
        b: fp32 `[output_size, ranks]`; it has the scaling.
        owners: `[ranks]` int64: the number of the adapter to which a rank belongs, in ascending order.
    """

    a: Tensor
    b: Tensor
    owners: Tensor


class KtftLinearMethod(UnquantizedLinearMethod):
    """The product of the layer's own method, plus B (A x) for every part of the output. It is a
    `ktft.serve.runtime.swap.LinearSlot` and, without a fixed rank, a `SharedSlot`.

    LoRA takes x in fp32, the dtype in which PEFT holds adapters, and its sum with the product is rounded once.

    Args:
        layer: gets the buffers `A` and `B`.
        step: which adapter each token has, where several are served.
        rank: the fixed rank of all parts. Code that was captured or compiled then finds another adapter in the same
            buffers, and zeros where there is none. None lets the rank follow the adapter, so that having none costs
            nothing.
    """

    def __init__(self, layer: Any, rank: int | None, step: StepAdapters | None = None) -> None:
        super().__init__()
        self.step = step or StepAdapters()
        self.shared: Shared | None = None
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
        if self.shared is not None and self.step.active:
            return self._add_shared(self.shared, x, out)
        if not self.rank:
            return out
        low = linear(x.to(torch.float32), getattr(layer, A)).split(self.rank, dim=-1)
        for own, b, part in zip(
            low, getattr(layer, B).split(self.slot.parts), out.split(self.slot.parts, dim=-1), strict=True
        ):
            part.add_(linear(own, b))
        return out

    def _add_shared(self, shared: Shared, x: Tensor, out: Tensor) -> Tensor:
        """Add to each row of the product LoRA of the row's adapter, if it has one here."""
        step, name = self.step, self.layer.prefix
        rows, sums = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        if len(rows) <= FEW_ROWS and len(step.active) > 1:
            own = step.of_rows(len(rows), name)[:, None] == shared.owners
            self._add(shared.a, shared.b, rows, sums, own)
            return out
        for number in step.active:
            mine = (shared.owners == number).nonzero()[:, 0]
            if not len(mine):
                continue
            columns = slice(int(mine[0]), int(mine[-1]) + 1)
            a, b, places = shared.a[:, columns], shared.b[:, columns], step.rows_of(number, len(rows), name)
            if places is None:
                self._add(a, b, rows, sums)
            else:
                some = sums[places]
                self._add(a, b, rows[places], some)
                sums[places] = some
        return out

    def _add(self, a: Tensor, b: Tensor, x: Tensor, out: Tensor, own: Tensor | None = None) -> None:
        """Add B (A x) to the rows of `out`, of the ranks that are a row's own where not all are."""
        low = linear(x.to(torch.float32), a.reshape(-1, a.shape[-1])).view(len(x), *a.shape[:2])
        if own is not None:
            low.masked_fill_(~own[:, None], 0.0)  # a product would make NaN of another adapter's infinity
        for part, (rows, sums) in enumerate(zip(b.split(self.slot.parts), out.split(self.slot.parts, 1), strict=True)):
            sums.add_(linear(low[:, part], rows))

    def joined(self, number: int, tensors: AB) -> Shared:
        if self.fixed:
            raise ValueError(f"{self.layer.prefix} is compiled, with room for one adapter that all tokens have")
        a, b = (each.to(self.device) for each in tensors)
        rank, parts = b.shape[1], len(self.slot.parts)
        own = Shared(a.view(parts, rank, -1), b, torch.full((rank,), number, device=self.device))
        if (old := self.shared) is None:
            return own
        return Shared(torch.cat([old.a, own.a], 1), torch.cat([old.b, own.b], 1), torch.cat([old.owners, own.owners]))

    def parted(self, number: int) -> Shared | None:
        if (old := self.shared) is None or not bool((stays := old.owners != number).any()):
            return None
        return old if bool(stays.all()) else Shared(old.a[:, stays], old.b[:, stays], old.owners[stays])

    def share(self, state: Shared | None) -> None:
        self.shared = state

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


def add_slots(model: nn.Module, config: VllmConfig, max_rank: int, step: StepAdapters) -> None:
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
        QUANT_METHOD.put(layer, KtftLinearMethod(layer, None if eager else max_rank, step))


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
