"""Everything that differs between the demo and its quick form for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Recipe:
    """How long and how to pretrain. Training ends after `steps` or `max_seconds`, whichever comes first."""

    steps: int = 500
    max_seconds: float = 240.0
    batch_size: int = 6
    sequence_length: int = 192
    learning_rate: float = 3e-3
    warmup: float = 0.05
    weight_decay: float = 0.1
    bias_update_speed: float = 0.02
    seed: int = 0


@dataclass(frozen=True)
class Scale:
    """Sizes of all stages; `model` changes the model's configuration, `yaml_overrides` the YAML's settings."""

    corpus_bytes: int = 8_000_000
    vocab_size: int = 2048
    recipe: Recipe = field(default_factory=Recipe)
    model: dict[str, Any] = field(default_factory=dict)
    heldout_records: int = 128
    yaml_overrides: tuple[str, ...] = ()
    prompts: int = 64  # held-out functions that are described without and with LoRA
    answer_tokens: int = 40
    required_gain: float = 0.25  # of the share of right answers


QUICK = Scale(
    corpus_bytes=600_000,
    vocab_size=512,
    recipe=Recipe(steps=20, max_seconds=10, batch_size=2, sequence_length=64),
    model={
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
    },
    heldout_records=16,
    yaml_overrides=(
        "max_steps=8",
        "eval_steps=4",
        "logging_steps=1",
        "warmup_steps=1",
        "learning_rate=5.0e-3",
        "cutoff_len=128",
    ),
    prompts=4,
    answer_tokens=4,
    required_gain=0.0,
)
