"""A checkpoint that makes the kernels fail for one token, as a damaged or overflowing model may."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file

TOKEN = 100
_PLACE = 7  # in the hidden states


def write_fragile(source: Path, folder: Path) -> Path:
    """Copy a tiny Qwen3-MoE so that the hidden states of `TOKEN` overflow, though all weights are finite.

    One place of the embedding is zero for every other token, attention adds nothing there, and the norm before the
    first layer's experts multiplies it by nearly the largest bf16 number.
    """
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).symlink_to(file)
            continue
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name == "model.embed_tokens.weight":
                tensor[:, _PLACE] = 0
                tensor[TOKEN, _PLACE] = 100
            elif name == "model.layers.0.self_attn.o_proj.weight":
                tensor[_PLACE] = 0
            elif name == "model.layers.0.post_attention_layernorm.weight":
                tensor[_PLACE] = 3e38
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
    return folder
