"""Tiny checkpoints, a byte-level tokenizer and data sets: all that tests train on, from fixed seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

END, PAD, START = "<|im_end|>", "<|endoftext|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,  # large enough for the experts to matter to the logits
    "bos_token_id": None,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3moe": (
        Qwen3MoeConfig,
        {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "dsv2": (
        DeepseekV2Config,
        DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    ),
    "dsv3": (DeepseekV3Config, DEEPSEEK | {"q_lora_rank": 32, "n_group": 4, "topk_group": 2}),
}
"""Name -> configuration class and its own settings. All have 3 layers and 8 experts."""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and three special tokens; nothing to train."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([PAD, START, END, *alphabet])}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([PAD, START, END])
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=END, pad_token=PAD, model_max_length=512)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_checkpoint(family: str, path: Path, **overrides: Any) -> Path:
    """Save a bf16 checkpoint of `family`, in two shards, with its tokenizer. `overrides` go to the config."""
    config_class, own = FAMILIES[family]
    tok = tokenizer()
    config = config_class(
        **COMMON | own | {"eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id} | overrides
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, buffer.numel()))
    model = model.to(torch.bfloat16)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(path, max_shard_size=total * 2 // 3)
    tok.save_pretrained(path)
    return path


def write_data(path: Path, rows: int = 16) -> Path:
    """Write data sets `sft`, `pt`, `dpo`, `kto` (dpo serves rm too) and LLaMA-Factory's dataset_info.json."""
    path.mkdir(parents=True, exist_ok=True)
    ask = [f"add {i} and {i + 1}" for i in range(rows)]
    right = [f"{2 * i + 1} ok" for i in range(rows)]
    wrong = [f"{3 * i} no" for i in range(rows)]
    sets = {
        "sft": [{"instruction": q, "input": "", "output": a} for q, a in zip(ask, right, strict=True)],
        "pt": [{"text": f"{q} gives {a}. "} for q, a in zip(ask, right, strict=True)],
        "dpo": [
            {"instruction": q, "input": "", "chosen": a, "rejected": b}
            for q, a, b in zip(ask, right, wrong, strict=True)
        ],
        "kto": [
            {"instruction": q, "input": "", "output": a if i % 2 else b, "kto_tag": bool(i % 2)}
            for i, (q, a, b) in enumerate(zip(ask, right, wrong, strict=True))
        ],
    }
    prompt = {"prompt": "instruction", "query": "input"}
    info: dict[str, Any] = {
        "sft": {},
        "pt": {"columns": {"prompt": "text"}},
        "dpo": {"ranking": True, "columns": prompt | {"chosen": "chosen", "rejected": "rejected"}},
        "kto": {"columns": prompt | {"response": "output", "kto_tag": "kto_tag"}},
    }
    for name, samples in sets.items():
        (path / f"{name}.json").write_text(json.dumps(samples))
        info[name]["file_name"] = f"{name}.json"
    (path / "dataset_info.json").write_text(json.dumps(info))
    return path
