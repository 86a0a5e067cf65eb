"""What is said before training of other programs is what `ktft export` says afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapted import adapted
from given import Checkpoint

from ktft.adapters.elsewhere import reasons_against, said_before_training
from ktft.adapters.export import TARGETS, open_adapter, plan
from ktft.config import PROJECTIONS

EVERYWHERE = ["o_proj", *PROJECTIONS]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", *EVERYWHERE]
"""As docs/guide/adapters.md recommends them for DeepSeek's attention."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.mark.parametrize(
    ("family", "options", "refused"),
    [
        ("qwen3moe", {}, set()),
        ("qwen3moe", {"modules_to_save": ["lm_head"]}, {"vllm", "sglang", "gguf"}),
        ("dsv3", {}, {"vllm", "gguf"}),
        ("dsv3", {"target_modules": ["experts", "o_proj"]}, set()),
        ("dsv3", {"target_modules": LATENT}, {"gguf"}),
        ("dsv3", {"target_modules": EVERYWHERE}, set()),
        ("dsv2", {"target_modules": EVERYWHERE}, set()),
        ("qwen2moe", {}, {"sglang"}),
        ("qwen2moe", {"target_modules": [*ATTENTION, *PROJECTIONS]}, set()),
        ("dsv2", {}, {"vllm", "sglang", "gguf"}),
        ("dsv2", {"target_modules": ["kv_a_proj_with_mqa"]}, {"sglang", "gguf"}),
        ("gpt_oss", {"target_modules": ["experts"]}, {"vllm", "sglang", "gguf"}),
    ],
)
def test_as_export_would(
    tiny_checkpoint: Checkpoint, tmp_path: Path, family: str, options: dict[str, Any], refused: set[str]
) -> None:
    model = adapted(tiny_checkpoint(family), **options)
    model.save_pretrained(tmp_path)
    found = set()
    for target in TARGETS:
        try:
            plan(open_adapter(tmp_path), target)
        except ValueError:
            found.add(target)
    assert dict(reasons_against(model)).keys() == found == refused
    said = said_before_training(model)
    assert bool(said) == bool(refused)
    assert all(f"{target}: " in said for target in refused)
