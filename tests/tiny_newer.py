"""Tiny settings of the families that not every tested transformers has, for `tiny.py`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest
import transformers
from transformers import PreTrainedConfig

T = TypeVar("T")
HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}
SPARSE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
INDEXER: dict[str, Any] = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
STREAMS: dict[str, Any] = {"hc_mult": 2}
DELTA: dict[str, Any] = {"linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
# About the size of gates and ups: many are clamped
CLAMP: dict[str, Any] = {"swiglu_limit": 1.2}
NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "dsv32": ("DeepseekV32Config", LATENT | INDEXER | {"n_group": 4, "topk_group": 2}),
    "dsv4": (
        "DeepseekV4Config",
        INDEXER
        | STREAMS
        | CLAMP
        | {"num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 32, "n_routed_experts": 8, "n_shared_experts": 1}
        | {"partial_rotary_factor": 0.5, "o_groups": 2, "o_lora_rank": 16, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]}
        | {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}}
        | {"mlp_layer_types": ["hash_moe", "moe", "moe"]},
    ),
    "kimi_k25": ("Kimi_K25Config", LATENT),
    "kimi_linear": (
        "KimiLinearConfig",
        LATENT
        | DELTA
        | {
            "q_lora_rank": None,
            "num_local_experts": 8,
            "layer_types": ["linear_attention", "full_attention"] * 1 + ["linear_attention"],
        },
    ),
    "glm4_lite": ("Glm4MoeLiteConfig", LATENT),
    "glm5_2": ("GlmMoeDsaConfig", LATENT | INDEXER | SPARSE | {"indexer_types": ["full", "shared", "full"]}),
    "glm5_next": (
        "Glm5NextConfig",
        LATENT
        | INDEXER
        | SPARSE
        | DELTA
        | STREAMS
        | CLAMP
        | {
            "qk_rope_head_dim": 0,
            "index_kpool": 2,
            "layer_types": ["linear_attention", "indexed_attention", "linear_attention"],
        }
        | {"indexer_types": ["full", "full", "full"]},
    ),
    "minimax_m3": (
        "MiniMaxM3VLConfig",
        HEADS
        | {
            "num_local_experts": 8,
            "intermediate_size": 32,
            "dense_intermediate_size": 96,
            "shared_intermediate_size": 32,
        }
        | {"rotary_dim": 8, "swiglu_limit": 1.5, "index_n_heads": 2, "index_head_dim": 16, "index_block_size": 4}
        | {"index_topk_blocks": 2, "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}
        | SPARSE,
    ),
    "hy3": ("HYV3Config", HEADS | SPARSE | {"num_experts": 8}),
    "hy4": ("HYV4Config", LATENT | INDEXER | SPARSE | STREAMS | CLAMP | {"indexer_types": ["full", "shared", "full"]}),
    "mimo": (
        "MiMoV2FlashConfig",
        HEADS
        | SPARSE
        | {"v_head_dim": 8, "n_routed_experts": 8, "sliding_window": 8}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "bailing": (
        "BailingHybridConfig",
        LATENT
        | {
            "num_local_experts": 8,
            "head_dim": 16,
            "layer_group_size": 2,
            "num_mtp_layers": 0,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "mistral4": ("Mistral3Config", LATENT | {"model_type": "mistral4", "first_k_dense_replace": 0}),
    "mistral_large4": ("MistralLarge4Config", LATENT | INDEXER),
    "gemma4": (
        "Gemma4TextConfig",
        HEADS
        | {"num_experts": 8, "top_k_experts": 2, "enable_moe_block": True, "hidden_size_per_layer_input": 0}
        | {"global_head_dim": 16, "num_global_key_value_heads": 2, "sliding_window": 8, "num_kv_shared_layers": 0}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "nemotron": (
        "NemotronHConfig",
        HEADS
        | {"n_routed_experts": 8, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 32, "n_group": 1}
        | {"hybrid_override_pattern": "ME*E-E"}  # Mamba, experts, attention, experts, a dense layer, experts
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 8}
        | {"moe_latent_size": 32, "moe_intermediate_size": 96, "routed_scaling_factor": 8.0},  # they matter to logits
    ),
    "step": (
        "Step3p7Config",
        HEADS
        | {"n_routed_experts": 8, "share_expert_dim": 32, "sliding_window": 8, "num_sliding_attention_heads": 2}
        | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "moe_router_scaling_factor": 1.5}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "swiglu_limits": [0.0, 0.0, 1.2]},
    ),
    "trinity": (
        "AfmoeConfig",
        HEADS | {"num_experts": 8, "num_shared_experts": 1, "sliding_window": 8, "num_dense_layers": 1},
    ),
    "llama4": (
        "Llama4Config",
        HEADS
        | {"num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size": 96, "intermediate_size_mlp": 48}
        | {
            "moe_layers": [0, 2],
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 1, 0],
            "attn_scale": 0.1,
            "floor_scale": 4,
        },
    ),
    "longcat": (
        "LongcatFlashConfig",
        {key: value for key, value in LATENT.items() if key not in ("n_group", "topk_group", "n_shared_experts")}
        | {"num_layers": 2, "num_hidden_layers": 4, "moe_topk": 3, "num_experts_per_tok": 3, "zero_expert_num": 4}
        | {"expert_ffn_hidden_size": 32, "ffn_hidden_size": 96, "head_dim": 8},
    ),
    "qwen4": (
        "Qwen4ExpConfig",
        HEADS
        | {"num_experts": 8, "shared_expert_intermediate_size": 32}
        | {
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        | {"layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "ple_layer_ids": [1]}
        | {"hc_count": 2, "hc_lowrank": 8, "ple_embed_dim": 32, "heads_per_ngram": 4, "ngram_vocab_size_base": 64}
        | {"make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1}
        | {"indexer_head_dim": 16, "indexer_budget": 4, "indexer_compress_ratio": 2},
    ),
}
"""Name -> the name of transformers' configuration class, and its own settings."""

WHOLE: dict[str, dict[str, Any]] = {
    "kimi_k25": {"tie_word_embeddings": False, "projection_hidden_size": 32},
    "minimax_m3": {"projector_hidden_size": 32},
}
"""Settings of the model around the text model."""

NAMES: dict[str, dict[str, str]] = {
    "kimi_k25": {r"^language_model\.model\.blocks\.": "language_model.model.layers.", r"^model\.mm_": "mm_"},
    "kimi_linear": {r"\.block_sparse_moe\.(gate|up|down)_proj\.": r".mlp.\1_proj."},
    "dsv4": {
        r"^model\.": "",
        r"^embed_tokens\.": "embed.",
        r"^hc_head\.hc_": "hc_head_",
        r"\.attn\.norm\.": ".attn.kv_norm.",
    },
}
"""Where save_pretrained does not write a release's names: patterns in them -> what the release has there."""


def new_names(family: str, tensors: dict[str, T]) -> dict[str, T]:
    """The same with the names of `NAMES`."""
    for pattern, replacement in NAMES.get(family, {}).items():
        tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in tensors.items()}
    return tensors


def known() -> dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]]:
    """The families of `NEWER` that the installed transformers has."""
    found = {name: (getattr(transformers, config, None), own) for name, (config, own) in NEWER.items()}
    return {
        name: (config, own)
        for name, (config, own) in found.items()
        if config is not None and hasattr(config().get_text_config(), "indexer_types") >= ("indexer_types" in own)
    }


DIFFERENT = ("dsv4", "kimi_linear", "minimax_m3", "nemotron", "step", "llama4", "longcat")
"""Those whose loading or arithmetic the others share: V4's hashes, clamp and names; joined convolutions; alpha. And
those with their own: no gate, and between layers with other names; limits by layer, in a layout without `experts`;
scaled inputs; experts that compute nothing.
"""


ON_BOTH = ("nemotron", "llama4", "longcat")
"""Those of `DIFFERENT` that both stacks have."""
SEE_IMAGES = {"qwen3vl", "glm5_next", "kimi_k25", "minimax_m3", "mistral4", "mistral_large4", "step"}
"""Those that transformers makes no AutoModelForCausalLM of, which `runs.adapted` loads."""


def without_the_like(families: Iterable[str]) -> list[Any]:
    """Parameters of a test, of which `make test` leaves out the families of `NEWER` that have nothing of their own."""
    like = NEWER.keys() - {*DIFFERENT}
    return [pytest.param(name, marks=pytest.mark.full) if name in like else name for name in families]
