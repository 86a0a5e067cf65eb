"""Write GGUF files with gguf's own writer and quantizers, from transformers' own model of a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ktft.config import PROJECTIONS

Kind = gguf.GGMLQuantizationType
Values = dict[tuple[int, int, str], Tensor]
"""Layer, expert, projection -> the values that gguf gives, in fp32."""

_SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
"""Where in a block of types that gguf cannot write the fp16 scale lies, and the one of what is subtracted."""
_SPREAD = {"Q2_K": 1e-2, "Q3_K": 2e-3, "Q4_K": 3e-4, "Q5_K": 1.5e-4, "Q6_K": 5e-5, "IQ4_XS": 1e-4}
_LEVELS = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}  # the mean of the codes, which makes the mean of the values 0


def quantized(values: np.ndarray, kind: str) -> np.ndarray:
    """Bytes of this type: of the values where gguf has a quantizer, and random ones of their size where it has none."""
    if kind not in _SCALES:
        return gguf.quantize(values, Kind[kind])
    count, nbytes = gguf.GGML_QUANT_SIZES[Kind[kind]]
    shape = (*values.shape[:-1], values.shape[-1] // count)
    blocks = np.random.default_rng(7).integers(0, 256, (*shape, nbytes), np.uint8)
    for at, factor in zip(_SCALES[kind], (1, _LEVELS.get(kind, 1)), strict=False):
        blocks[..., at : at + 2] = np.float16([_SPREAD[kind] * factor]).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def stacked_experts(checkpoint: Path) -> dict[int, dict[str, np.ndarray]]:
    """Layer -> the stacked experts' tensors in llama.cpp's arrangement, by projection; biases as `PROJECTION.bias`."""
    found: dict[int, dict[str, np.ndarray]] = {}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name, module in model.named_modules():
        if not name.endswith(".experts") or not hasattr(module, "gate_up_proj"):
            continue
        both, down = module.gate_up_proj.detach(), module.down_proj.detach()
        if hasattr(module, "gate_up_proj_bias"):  # gpt-oss: [experts, in, out], gates and ups in turns
            halves = both.mT[:, ::2], both.mT[:, 1::2]
            down = down.mT
            biases = module.gate_up_proj_bias.detach()
            biased = {"gate_proj.bias": biases[:, ::2], "up_proj.bias": biases[:, 1::2]}
            biased["down_proj.bias"] = module.down_proj_bias.detach()
        else:
            halves, biased = both.chunk(2, 1), {}
        parts = dict(zip(PROJECTIONS, (*halves, down), strict=True)) | biased
        layer = int(name.split(".layers.")[1].split(".")[0])
        found[layer] = {key: part.contiguous().numpy() for key, part in parts.items()}
    return found


def write_gguf(
    checkpoint: Path,
    target: Path,
    architecture: str,
    kinds: dict[str, str] | str = "Q8_0",
    layout: str = "stacked",
    fields: dict[str, Any] | None = None,
    change: Callable[[dict[str, tuple[np.ndarray, Any]]], Any] | None = None,
    split: int = 0,
) -> Values:
    """Write the experts of a checkpoint, and one tensor that has nothing to do with them. Returns their values.

    Args:
        kinds: the type of every projection, or of all of them.
        layout: `stacked`, `merged` (gate and up in one tensor) or `separate` (a tensor for each expert).
        fields: replace keys of the header, those of sizes without the architecture; None leaves a key out.
        change: changes tensors: name -> values or bytes, and their type (None: as numpy has them).
        split: the number of tensors in a file; 0 writes one file.
    """
    layers = stacked_experts(checkpoint)
    tensors: dict[str, tuple[np.ndarray, Any]] = {"token_embd.weight": (np.zeros((8, 64), np.float32), None)}
    values: Values = {}
    for layer, parts in layers.items():
        for projection in PROJECTIONS:
            kind = kinds if isinstance(kinds, str) else kinds[projection]
            raw = quantized(parts[projection], kind)
            exact = torch.from_numpy(gguf.dequantize(raw, Kind[kind]).copy()).view(parts[projection].shape)
            values |= {(layer, expert, projection): each for expert, each in enumerate(exact)}
            tensors |= _named(layer, projection, raw, kind, layout)
        tensors |= {
            f"blk.{layer}.ffn_{key[:-10]}_exps.bias": (part, None)
            for key, part in parts.items()
            if key.endswith(".bias")
        }
        if layout == "merged":
            (gate, kind), (up, _) = (tensors.pop(f"blk.{layer}.ffn_{each}_exps.weight") for each in ("gate", "up"))
            tensors[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate((gate, up), 1), kind
    if change is not None:
        change(tensors)
    first = layers[max(layers)]["gate_proj"]
    sizes = {
        "block_count": max(layers) + 1,
        "embedding_length": first.shape[2],
        "expert_count": first.shape[0],
        "expert_feed_forward_length": first.shape[1],
    }
    writer = gguf.GGUFWriter(target, architecture, split_max_tensors=split)
    for key, value in (sizes | (fields or {})).items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_token_list(["a", "b"])
    writer.add_token_types([1, 1])
    for name, (array, kind) in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _named(layer: int, projection: str, raw: np.ndarray, kind: str, layout: str) -> dict[str, tuple[np.ndarray, Any]]:
    name = f"blk.{layer}.ffn_{projection.removesuffix('_proj')}"
    if layout == "separate":
        return {f"{name}.{expert}.weight": (each, Kind[kind]) for expert, each in enumerate(raw)}
    return {f"{name}_exps.weight": (raw, Kind[kind])}
