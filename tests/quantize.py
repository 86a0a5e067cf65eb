"""Quantize plain checkpoints with each scheme, implemented anew from its definition, and give the dequantized values.

Scales are a third larger than needed, so that no group reaches the end of its range. Scales that are derived from the
values therefore differ from the stored ones.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ktft.checkpoint.reader import INDEX_NAME
from ktft.config import PROJECTIONS

SLACK = 1.37
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Stored = tuple[dict[str, Tensor], Tensor]


def blocks_of(weight: Tensor, rows: int, cols: int, largest: float) -> Tensor:
    """A scale for each block of rows x cols."""
    strips = weight.abs().split(rows)
    extremes = torch.stack([torch.stack([block.max() for block in strip.split(cols, dim=1)]) for strip in strips])
    return extremes.clamp_min(1e-6) * (SLACK / largest)


def spread(scales: Tensor, rows: int, cols: int, shape: torch.Size) -> Tensor:
    return torch.kron(scales, torch.ones(rows, cols))[: shape[0], : shape[1]]


def fp8(weight: Tensor, rows: int = 128, cols: int = 128, suffix: str = "_scale_inv", dtype: Any = None) -> Stored:
    rows, cols = min(rows, weight.shape[0]), min(cols, weight.shape[1])
    scales = blocks_of(weight, rows, cols, 448).to(dtype or torch.float32)
    wide = spread(scales.float(), rows, cols, weight.shape)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight" + suffix: scales}, codes.float() * wide


def fp8_channel(weight: Tensor) -> Stored:
    return fp8(weight, 1, weight.shape[1], "_scale", torch.bfloat16)


def fp8_tensor(weight: Tensor) -> Stored:
    tensors, values = fp8(weight, *weight.shape, "_scale")
    return tensors | {"weight_scale": tensors["weight_scale"].reshape(1)}, values


def deepseek_fp8(weight: Tensor) -> Stored:
    scales = 2 ** torch.ceil(torch.log2(blocks_of(weight, 128, 128, 448)))
    wide = spread(scales, 128, 128, weight.shape)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "scale": scales.to(torch.float8_e8m0fnu)}, codes.float() * wide


def pack_words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """int32 words of eight codes along the last dimension; `order[i]` lies in bits 4 i."""
    words = codes.long().unflatten(-1, (-1, 8))
    return sum(words[..., column] << 4 * i for i, column in enumerate(order)).to(torch.uint32).view(torch.int32)


def int4(weight: Tensor, group: int = 32, scale_dtype: torch.dtype = torch.bfloat16) -> Stored:
    group = group if group > 0 else weight.shape[1]
    scales = blocks_of(weight, 1, group, 7).to(scale_dtype)
    wide = spread(scales.float(), 1, group, weight.shape)
    q = (weight / wide).round().clamp(-8, 7)
    shape = torch.tensor(weight.shape)
    return {"weight_packed": pack_words(q + 8), "weight_scale": scales, "weight_shape": shape}, q * wide


def mxfp4(weight: Tensor) -> Stored:
    """`blocks` [out, in / 32, 16] and `scales` [out, in / 32]."""
    exponents = torch.floor(torch.log2(blocks_of(weight, 1, 32, 6))) + 1
    wide = spread(2**exponents, 1, 32, weight.shape)
    codes = (weight.abs() / wide).unsqueeze(-1).sub(E2M1).abs().argmin(-1)
    values = E2M1[codes] * wide * weight.sign()
    codes = codes + 8 * (weight < 0)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8).unflatten(1, (-1, 16))
    return {"blocks": packed, "scales": (exponents + 127).to(torch.uint8)}, values


def deepseek_fp4(weight: Tensor) -> Stored:
    parts, values = mxfp4(weight)
    codes, scales = parts["blocks"].flatten(1).view(torch.int8), parts["scales"].view(torch.float8_e8m0fnu)
    return {"weight": codes, "scale": scales}, values


def gptq(weight: Tensor, group: int = 32, symmetric: bool = True, order: bool = False, offset: int = 1) -> Stored:
    out, inputs = weight.shape
    groups = torch.arange(inputs) // group
    if order:
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))]
    scales, zeros = torch.empty(inputs // group, out), torch.empty(inputs // group, out)
    for g in range(inputs // group):
        part = weight[:, groups == g]
        scales[g] = part.abs().amax(1) * (SLACK / 7)
        zeros[g] = 8 if symmetric else (torch.arange(out) % 9 + 4)
    scales = scales.half().float()
    q = (weight / scales.T[:, groups] + zeros.T[:, groups]).round().clamp(0, 15)
    tensors = {
        "qweight": pack_words(q.T.reshape(inputs // 8, 8, out).transpose(1, 2).flatten(1)),
        "qzeros": pack_words((zeros - offset).long() & 15),
        "scales": scales.half(),
        "g_idx": groups.int(),
    }
    return tensors, (q - zeros.T[:, groups]) * scales.T[:, groups]


def awq(weight: Tensor, group: int = 32) -> Stored:
    tensors, values = gptq(weight, group, symmetric=False)
    out, inputs = weight.shape
    zeros = (torch.arange(out) % 9 + 4).expand(inputs // group, out)
    groups = torch.arange(inputs) // group
    scales = tensors["scales"].float()
    q = (values / scales.T[:, groups]).round() + zeros.T[:, groups]
    words = {"qweight": pack_words(q.T, AWQ_ORDER), "qzeros": pack_words(zeros, AWQ_ORDER)}
    return words | {"scales": tensors["scales"]}, values


def compressed(weights: dict[str, Any], written: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": written, "config_groups": {"group_0": group}}


def _int4_config(group: int) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group > 0 else {"strategy": "channel", "group_size": None}
    return compressed({"num_bits": 4, "type": "int", "symmetric": True, "actorder": None, **strategy}, "pack-quantized")


def _fp8_config(strategy: str) -> dict[str, Any]:
    return compressed({"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}, "float-quantized")


def _gptq_config(group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False, **more}


SCHEMES: dict[str, tuple[Callable[[Tensor], Stored], dict[str, Any]]] = {
    "fp8": (fp8, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}),
    "fp8-bf16-scales": (
        lambda w: fp8(w, dtype=torch.bfloat16),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "fp8-channel": (fp8_channel, _fp8_config("channel")),
    "fp8-tensor": (fp8_tensor, _fp8_config("tensor")),
    "fp8-block": (lambda w: fp8(w, suffix="_scale"), _fp8_config("block")),
    "int4-32": (int4, _int4_config(32)),
    "int4-channel": (lambda w: int4(w, -1), _int4_config(-1)),
    "int4-fp16-scales": (lambda w: int4(w, 32, torch.float16), _int4_config(32)),
    "gptq": (gptq, _gptq_config()),
    "gptq-asym": (lambda w: gptq(w, symmetric=False), _gptq_config(sym=False)),
    "gptq-order": (lambda w: gptq(w, symmetric=False, order=True), _gptq_config(desc_act=True)),
    "gptq-v2": (lambda w: gptq(w, offset=0), _gptq_config(checkpoint_format="gptq_v2")),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
}
"""Name -> a function from a weight to its stored tensors and values, and config.json's `quantization_config`."""

MXFP4_CONFIG = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
DEEPSEEK_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "expert_dtype": "fp4",
}
ALL_SCHEMES = SCHEMES | {"mxfp4": (mxfp4, MXFP4_CONFIG), "fp4-fp8": (deepseek_fp8, DEEPSEEK_CONFIG)}
"""`SCHEMES`, the one that only stacked experts have, and the one that is another for experts, by `EXPERTS`."""
EXPERTS = {"fp4-fp8": deepseek_fp4}


LINEAR = re.compile(
    r"(?<!indexer\.weights)_proj(_with_mqa|_qkvz|_qkv|_z)?\.weight$|\.(w[123]|wk|wkv|w[qo]_[ab])\.weight$|experts\.(gate_up|down)_proj$"
)


def is_linear(name: str) -> bool:
    """Whether released checkpoints quantize a weight: projections of attention and MLPs, experts included."""
    return bool(LINEAR.search(name))


def is_expert(name: str) -> bool:
    """Whether a tensor is a weight of routed experts."""
    return ".experts." in name and not name.endswith("bias")


def read_all(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def write(source: Path, target: Path, tensors: dict[str, Tensor], quantization: dict[str, Any] | None) -> Path:
    """A checkpoint like `source`, in two shards, with other tensors and another `quantization_config`."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", INDEX_NAME))
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (2 * i >= len(names))}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: tensors[name].contiguous().clone() for name in names if files[name] == file}
        save_file(part, target / file, metadata={"format": "pt"})
    (target / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = json.loads((target / "config.json").read_text())
    config.pop("quantization_config", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config))
    return target


def separate(tensors: dict[str, Tensor], transposed: bool) -> dict[str, Tensor]:
    """Split stacked experts into one tensor for each expert and projection."""
    apart = dict(tensors)
    for name in [name for name in tensors if is_expert(name) and not name.endswith(".weight")]:
        stem, kind = name.rsplit(".", 1)
        weight = apart.pop(name).mT if transposed else apart.pop(name)
        parts = (("down_proj", weight),)
        if kind == "gate_up_proj":
            parts = tuple(zip(("gate_proj", "up_proj"), weight.chunk(2, dim=1), strict=True))
        for projection, stacked in parts:
            apart |= {f"{stem}.{e}.{projection}.weight": matrix.contiguous() for e, matrix in enumerate(stacked)}
    return apart


def stack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `separate`: experts as transformers 5 writes them."""
    together = {name: t for name, t in tensors.items() if not is_expert(name)}
    for stem in {name.rsplit(".", 3)[0] for name in tensors if is_expert(name)}:
        experts = [[tensors[f"{stem}.{e}.{name}.weight"] for e in range(8)] for name in PROJECTIONS]
        gate, up, down = (torch.stack(matrices) for matrices in experts)
        together |= {f"{stem}.gate_up_proj": torch.cat([gate, up], dim=1), f"{stem}.down_proj": down}
    return together


def changed(
    source: Path, target: Path, change: Callable[[dict[str, Tensor]], Any], quantization: dict[str, Any] | None = None
) -> Path:
    """A copy of a checkpoint, whose tensors `change` has changed in place."""
    tensors = read_all(source)
    change(tensors)
    return write(source, target, tensors, quantization)


def stacked_name(stem: str, part: str) -> str:
    """The name of a part of stacked experts."""
    return stem + (part.removeprefix("weight") if part.startswith("weight") else f"_{part}")


def encode_stacked(encode: Callable[[Tensor], Stored], experts: Tensor, transposed: bool = True) -> Stored:
    """Encode experts as stored, `[E, in, out]` if `transposed`. MXFP4's blocks always run along output rows."""
    turn = transposed and encode is mxfp4
    encoded = [encode(matrix.T.contiguous() if turn else matrix) for matrix in experts]
    tensors = {part: torch.stack([each[part] for each, _ in encoded]) for part in encoded[0][0]}
    return tensors, torch.stack([values.T if turn else values for _, values in encoded])


def quantize(
    source: Path, folder: Path, scheme: str, chosen: Callable[[str], bool] = is_linear
) -> tuple[Path, Path, dict[str, Tensor]]:
    """Quantize the chosen weights of a checkpoint.

    Returns:
        The quantized checkpoint, the dequantized one (fp32), and the latter's tensors.
    """
    encode, config = ALL_SCHEMES[scheme]
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in read_all(source).items():
        stored[name], plain[name] = tensor, tensor.float()
        if chosen(name):
            del stored[name]
            if tensor.dim() == 3:
                parts, plain[name] = encode_stacked(encode, tensor.float())
                stored |= {stacked_name(name, part): value for part, value in parts.items()}
            else:
                own = EXPERTS.get(scheme, encode) if is_expert(name) else encode
                parts, plain[name] = own(tensor.float())
                stored |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
    return write(source, folder / "quantized", stored, config), write(source, folder / "plain", plain, None), plain
