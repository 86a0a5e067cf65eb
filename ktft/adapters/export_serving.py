"""Adapters for servers that read PEFT's files but accept only one rank and one scaling for all modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ktft.adapters.files import LazyTensor
from ktft.adapters.saved import FROZEN, Place, SavedAdapter, int_if_whole
from ktft.checkpoint.layouts import SEPARATE
from ktft.config import PROJECTIONS
from ktft.model.experts import experts_family

MLA_UP = "kv_b_proj"
EXPERTS = "experts"
ATTENTION = ("q_proj", "k_proj", "v_proj")
LATENT = ("q_a_proj", "kv_a_proj_with_mqa")


@dataclass(frozen=True)
class ServerRules:
    """What a server does with a standard adapter. Modules are meant by the last parts of their names.

    Attributes:
        together: groups of modules that the server fuses: all of a group have LoRA or none, missing ones get zeros.
        known: the modules that the server loads LoRA for; None if it reports unknown ones itself.
        ignored: modules whose LoRA the server loads but does not always apply, with the reason.
    """

    name: str
    together: tuple[tuple[str, ...], ...]
    known: frozenset[str] | None
    ignored: dict[str, str]


VLLM = ServerRules(
    "vLLM",
    together=(),  # except experts: vLLM asserts that every projection is there
    known=None,
    ignored={MLA_UP: "which decoding multiplies into other weights before any adapter is loaded"},
)
SGLANG = ServerRules(
    "SGLang",
    together=(ATTENTION, LATENT, ("gate_proj", "up_proj")),
    known=frozenset({*ATTENTION, *LATENT, *PROJECTIONS, "o_proj", "q_b_proj", MLA_UP}),
    ignored={},
)
"""SGLang scales by lora_alpha / r, whatever use_rslora, rank_pattern and alpha_pattern say."""


def even_out(adapter: SavedAdapter, server: ServerRules) -> tuple[dict[str, Any], dict[str, LazyTensor]]:
    """The configuration and tensors of an adapter with one rank and one scaling.

    Lower ranks are padded with zeros, and other scalings are multiplied into B. Modules that the server wants together
    with others get pairs of zeros.

    Raises ValueError if the server cannot hold the adapter, or would not apply all of it.
    """
    _check(adapter, server)
    places = adapter.places | {place.name: place for place in _missing(adapter, server)}
    held = list(adapter.places.values())
    r = max(place.r for place in held)
    scalings = {place.scaling for place in held}
    scaling = scalings.pop() if len(scalings) == 1 else 1.0
    tensors: dict[str, LazyTensor] = {}
    dtype = adapter.dtype(held[0])
    for name, place in places.items():
        for kind, shape in (("lora_A", (r, place.fan_in)), ("lora_B", (place.fan_out, r))):
            factor = place.scaling / scaling if kind == "lora_B" else 1.0
            stored = place.tensor(kind) if name in adapter.places else None
            own = dtype if stored is None else adapter.dtype(place)
            tensors[place.standard(kind)] = _padded(adapter, stored, shape, factor, own)
    config = adapter.config.to_dict() | {
        "r": r,
        "lora_alpha": int_if_whole(scaling * r),
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted({place.leaf for place in places.values()}),
        **FROZEN,
    }
    return config, tensors


def _padded(
    adapter: SavedAdapter, name: str | None, shape: tuple[int, int], factor: float, dtype: torch.dtype
) -> LazyTensor:
    def make() -> Tensor:
        if name is None:
            return torch.zeros(shape, dtype=dtype)
        found = adapter.read(name)
        if tuple(found.shape) == shape and factor == 1.0:
            return found
        padded = torch.zeros(shape)
        padded[: found.shape[0], : found.shape[1]] = found.float() * factor
        return padded.to(dtype)

    return LazyTensor(dtype, shape, make)


def _check(adapter: SavedAdapter, server: ServerRules) -> None:
    merge = "merge it instead (ktft merge)"
    if adapter.whole:
        raise ValueError(
            f"{server.name} loads LoRA alone, and the adapter holds {adapter.whole[0]}, trained whole "
            f"(modules_to_save, additional_target); {merge}"
        )
    family = experts_family(adapter.model)
    if family.layouts[0] != SEPARATE:
        raise ValueError(
            f"{server.name} knows the experts of {family.name} by other names, or in another layout, which export does "
            f"not write; {merge}"
        )
    if not adapter.places:
        raise ValueError(f"{adapter.directory} has no LoRA to export")
    for place in adapter.places.values():
        if place.leaf in server.ignored:
            raise ValueError(
                f"{server.name} would not apply {place.tensor('lora_A')}: it is on {place.leaf}, "
                f"{server.ignored[place.leaf]}; {merge}, or train without {place.leaf} in lora_target"
            )
        if server.known is not None and place.leaf not in server.known:
            raise ValueError(f"{server.name} has no place for {place.tensor('lora_A')}; {merge}")


def _missing(adapter: SavedAdapter, server: ServerRules) -> Iterator[Place]:
    """Yield the modules without LoRA that need it because the server fuses them with modules that have it."""
    for name, module in adapter.experts.items():
        for expert, projection in product(range(module.num_experts), module.projections):
            if f"{name}.{expert}.{projection}" not in adapter.places:
                yield adapter.expert_place(name, expert, projection)
    for place in list(adapter.places.values()):
        group = next((group for group in server.together if place.leaf in group), None)
        if group is None or place.experts is not None:
            continue
        parent = place.name.rpartition(".")[0]
        for leaf in group:
            sibling = f"{parent}.{leaf}"
            if not isinstance(getattr(adapter.model.get_submodule(parent), leaf, None), nn.Linear):
                raise ValueError(
                    f"{server.name} reads {place.tensor('lora_A')} as part of {', '.join(group)} together, and the "
                    f"model has no {sibling}; merge it (ktft merge), or train without {place.leaf} in lora_target"
                )
            if sibling not in adapter.places:
                yield adapter.linear_place(sibling)
