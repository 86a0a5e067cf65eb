"""Prediction layers for tiny checkpoints, which transformers has no code to make."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NUMBER = 3
"""That of the layer behind the last of `tiny.COMMON`'s."""
AROUND = "embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"
AROUND += ("shared_head.head.weight",)


def add_prediction_layer(checkpoint: Path, weight: float = 0.3) -> Path:
    """Add one to a checkpoint of `tiny`, whose decoder layer is the last layer's with its experts turned around.

    What it drafts is made of the hidden state that the last token was made of, and to a part of `weight` of what the
    decoder layer computes: drafts are right where a text repeats a token, unless the latter is against it.
    """
    settings = json.loads((checkpoint / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    if settings["model_type"] == "deepseek_v3":  # as in the config of a released model
        settings |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    (checkpoint / "config.json").write_text(json.dumps(settings))
    tensors = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    hidden, last, new = settings["hidden_size"], f"model.layers.{NUMBER - 1}.", f"model.layers.{NUMBER}."
    experts = settings["n_routed_experts"]
    for name in [each for each in tensors if each.startswith(last)]:
        turned = re.sub(r"(?<=\.experts\.)\d+", lambda found: str(experts - 1 - int(found[0])), name)
        part = weight if turned.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        tensors[turned.replace(last, new)] = tensors[name] * part
    draw = torch.Generator().manual_seed(5)
    mixed = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
    mixed += 0.05 * torch.randn(hidden, 2 * hidden, generator=draw)
    kind = tensors["model.norm.weight"].dtype
    words, norm, head = (tensors[name] for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"))
    for name, tensor in zip(AROUND, (words, torch.ones(hidden), torch.ones(hidden), mixed, norm, head), strict=True):
        tensors[new + name] = tensor.clone().to(kind)
    for file in (*checkpoint.glob("*.safetensors"), *checkpoint.glob("*.safetensors.index.json")):
        file.unlink()
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    return checkpoint
