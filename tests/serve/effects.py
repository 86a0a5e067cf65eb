"""The effect that an adapter should have, by transformers alone; settings of a tiny model with latent attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from in_process import IDS, Served
from merging import merged_by_hand, stock
from torch import Tensor

# vLLM has its own names for the router's settings
DSV3: dict[str, Any] = {"kv_lora_rank": 256, "qk_nope_head_dim": 32, "v_head_dim": 32, "qk_rope_head_dim": 64} | {
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
# On the CPU, vLLM 0.32's own operator for interleaved rotary embeddings is wrong for more than one head
MLA: dict[str, Any] = {
    "attention_backend": "CPU_MLA",
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    "dtype": "float32",
}


def expected(base: Path, adapter: Path | None = None) -> Tensor:
    """transformers' log-probabilities, with the adapter merged into the weights by its tensors' names."""
    model = stock(base) if adapter is None else merged_by_hand(base, adapter)
    with torch.no_grad():
        logits = model.eval()(input_ids=torch.tensor([IDS])).logits[0]
    return logits.float().log_softmax(-1)[:-1].gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


def error_of_effect(running: Served, base: Path, adapter: Path, plain: Tensor) -> float:
    """The error of an adapter's effect, relative to the effect that it should have."""
    wanted = expected(base, adapter) - expected(base)
    assert wanted.norm() > 0.3, "the adapter has to matter"
    return float((running.logprobs() - plain - wanted).norm() / wanted.norm())
