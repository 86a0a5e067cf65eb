"""Adapters for llama.cpp: one GGUF file, with a layer's experts stacked as llama.cpp stacks them.

For each tensor, by its GGUF name, llama.cpp takes `<tensor>.lora_a` `[E, r, in]` or `[r, in]` and `<tensor>.lora_b`
`[E, out, r]` or `[out, r]`. It scales by `adapter.lora.alpha / r` with the r of each pair. A model's graph applies LoRA
where it calls `build_lora_mm`; llama.cpp also loads a pair for any other matrix, but the pair has no effect.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch

from ktft.adapters.files import LazyTensor, Progress
from ktft.adapters.lora import KINDS
from ktft.adapters.saved import Place, SavedAdapter
from ktft.checkpoint.families import ROWS, Gguf
from ktft.model.experts import experts_family

FILE = "adapter.gguf"
SUFFIXES = {"lora_A": ".lora_a", "lora_B": ".lora_b"}


def arrange(adapter: SavedAdapter) -> tuple[str, float, dict[str, LazyTensor]]:
    """The name of llama.cpp's architecture, alpha, and the tensors by their GGUF names.

    Raises ValueError if gguf is not installed, or llama.cpp does not have the model or would not apply a tensor.
    """
    try:
        import gguf
    except ImportError:
        raise ValueError("writing GGUF needs the package gguf: pip install 'ktft[gguf]'") from None
    own, row = _architecture(adapter)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == own)
    names = gguf.get_tensor_name_map(arch, adapter.base.get_text_config().num_hidden_layers)
    groups: dict[str, list[Place]] = defaultdict(list)
    for place in adapter.places.values():
        module = place.name if place.experts is None else f"{place.experts}.{place.leaf}"
        name = names.get_name(f"{module}.weight", try_suffixes=(".weight",))
        if name is None or place.leaf in row.unapplied:
            raise ValueError(
                f"llama.cpp's {own} {'has no place for' if name is None else 'does not apply LoRA to'} {module} "
                f"({place.tensor('lora_A')}): merge the adapter (ktft merge) and convert the result, or train without "
                f"{place.leaf} in lora_target"
            )
        groups[name].append(place)
    alpha = float(adapter.config.lora_alpha) or float(adapter.config.r)
    tensors = {
        name + SUFFIXES[kind]: _stacked(adapter, places, kind, alpha)
        for name, places in groups.items()
        for kind in KINDS
    }
    return own, alpha, tensors


def _architecture(adapter: SavedAdapter) -> tuple[str, Gguf]:
    """llama.cpp's name of the adapter's architecture, and what is known of its graph."""
    family = experts_family(adapter.model)
    if family.gguf is None or family.architecture is None:
        known = ", ".join(row.name for row in ROWS if row.gguf is not None)
        raise ValueError(
            f"export to GGUF knows {known}, not {family.name}; merge the adapter (ktft merge) and convert the result"
        )
    if adapter.whole:
        raise ValueError(
            f"a GGUF adapter holds LoRA alone, and the adapter holds {adapter.whole[0]}, trained whole; merge it "
            "(ktft merge) and convert the result"
        )
    return family.architecture, family.gguf


def _stacked(adapter: SavedAdapter, places: list[Place], kind: str, alpha: float) -> LazyTensor:
    first = places[0]
    shape = first.shape(kind)
    factor = first.scaling * first.r / alpha if kind == "lora_B" else 1.0
    whole = shape if first.experts is None else (len(places), *shape)
    return LazyTensor(torch.float32, whole, lambda: adapter.stack(places, kind).mul_(factor).view(whole))


def write(directory: Path, arch: str, alpha: float, tensors: dict[str, LazyTensor], progress: Progress) -> None:
    """Write `FILE` into a directory, one tensor in memory at a time."""
    import gguf

    writer = gguf.GGUFWriter(directory / FILE, arch)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for name, tensor in tensors.items():
        writer.add_tensor_info(name, tensor.shape, torch.empty(0).numpy().dtype, tensor.nbytes)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            writer.write_tensor_data(tensor.make().numpy())
            progress(name, tensor.nbytes)
    finally:
        writer.close()
