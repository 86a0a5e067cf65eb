"""Tiny checkpoints, a byte-level tokenizer and data sets from fixed seeds, for all tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import tiny_newer
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ktft.model.kimi_k2 import KimiK2Config, register

register()

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
        transformers.Qwen3MoeConfig,
        {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "dsv2": (
        transformers.DeepseekV2Config,
        DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    ),
    "dsv3": (transformers.DeepseekV3Config, DEEPSEEK | {"q_lora_rank": 32, "n_group": 4, "topk_group": 2}),
}
"""Name -> configuration class and its own settings. All have 3 layers and 8 experts."""

HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 16}
SHARED: dict[str, Any] = {"num_experts": 8, "shared_expert_intermediate_size": 32}
LINEAR_ATTENTION: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
# Neither the intermediate size nor twice it is the hidden size: a transposed matrix has another shape
OBLONG: dict[str, Any] = {"moe_intermediate_size": 96}
ROPE_3D = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0],
    "patch_size": 4,
    "num_position_embeddings": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
IMAGE_TOKENS = {"image_token_id": 316, "video_token_id": 317, "vision_start_token_id": 318, "vision_end_token_id": 319}
MORE_FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen2moe": (transformers.Qwen2MoeConfig, {"num_key_value_heads": 2} | SHARED),
    "qwen3next": (transformers.Qwen3NextConfig, HEADS | SHARED | LINEAR_ATTENTION),
    "qwen3_5": (transformers.Qwen3_5MoeConfig, HEADS | SHARED | LINEAR_ATTENTION | OBLONG | ROPE_3D),
    "qwen3_5_text": (transformers.Qwen3_5MoeTextConfig, HEADS | SHARED | LINEAR_ATTENTION | OBLONG),
    "qwen3vl": (transformers.Qwen3VLMoeConfig, HEADS | OBLONG | ROPE_3D | {"num_experts": 8}),
    "kimi_k2": (KimiK2Config, DEEPSEEK | {"q_lora_rank": 32, "n_group": 1, "topk_group": 1}),
    "glm4": (
        transformers.Glm4MoeConfig,
        HEADS | {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "glm5": (
        transformers.GlmMoeDsaConfig,
        DEEPSEEK
        | {"q_lora_rank": 32, "n_group": 1, "topk_group": 1, "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "minimax": (transformers.MiniMaxM2Config, HEADS | {"num_local_experts": 8, "intermediate_size": 32}),
    "gpt_oss": (
        transformers.GptOssConfig,
        HEADS
        | {"num_local_experts": 8, "intermediate_size": 96, "sliding_window": 8}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "mixtral": (
        transformers.MixtralConfig,
        {"num_key_value_heads": 2, "num_local_experts": 8, "intermediate_size": 32},
    ),
    "olmoe": (transformers.OlmoeConfig, {"num_key_value_heads": 4, "num_experts": 8, "intermediate_size": 32}),
    "ernie": (
        transformers.Ernie4_5_MoeConfig,
        {"num_key_value_heads": 2, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1}
        | {"moe_layer_start_index": 1},
    ),
    **tiny_newer.known(),
}
"""The same for families whose experts differ from those of `FAMILIES` in names, layout or function at most."""


def make_config(family: str, **overrides: Any) -> PreTrainedConfig:
    """A tiny model's configuration, for our tokenizer. `overrides` go to the text model."""
    config_class, own = (FAMILIES | MORE_FAMILIES)[family]
    tok = tokenizer()
    settings = COMMON | own | {"eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id} | overrides
    if "text_config" in config_class.sub_configs:
        return config_class(
            text_config=settings, vision_config=VISION, **IMAGE_TOKENS, **tiny_newer.WHOLE.get(family, {})
        )
    return config_class(**settings)


def make_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Random bf16 weights, biases included, that all matter to the logits."""
    torch.manual_seed(0)
    has_images = "text_config" in type(config).sub_configs
    model = (AutoModelForImageTextToText if has_images else AutoModelForCausalLM).from_config(config)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("e_score_correction_bias", "mlp.expert_bias")):
            tensor.data.copy_(torch.linspace(-0.1, 0.1, tensor.numel()).view_as(tensor))
        elif name.endswith("tid2eid"):  # each token's experts, where a hash chooses them
            tensor.copy_(torch.rand(len(tensor), 8).topk(tensor.shape[1]).indices)
        elif ".experts." in name and name.endswith("_bias"):
            torch.nn.init.normal_(tensor, std=0.5)
    return model.to(torch.bfloat16)


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
    tok = tokenizer()
    model = make_model(make_config(family, **overrides))
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(path, max_shard_size=total * 2 // 3)
    tok.save_pretrained(path)
    if family in RELEASED:
        for shard in path.glob("*.safetensors"):
            save_file(RELEASED[family](load_file(shard)), shard, metadata={"format": "pt"})
        index = path / "model.safetensors.index.json"
        files = json.loads(index.read_text())["weight_map"]
        index.write_text(json.dumps({"metadata": {}, "weight_map": tiny_newer.new_names(family, files)}))
    if family == "kimi_k2":  # the code of its authors must not be needed
        settings = json.loads((path / "config.json").read_text())
        settings |= {"architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "code.KimiK2Config"}}
        (path / "config.json").write_text(json.dumps(settings))
    return path


def _transposed_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}


RELEASED: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "qwen3vl": _transposed_experts,
    **{name: partial(tiny_newer.new_names, name) for name in tiny_newer.NAMES},
}
"""Families whose authors store tensors in another layout than save_pretrained does."""


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


def factory_settings(model: Path | str, data: Path | str, output: Path | str, **overrides: Any) -> dict[str, Any]:
    """LLaMA-Factory's settings: LoRA on all of a model with ktft's experts, trained on the data set `sft`."""
    return {
        "model_name_or_path": str(model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "lora_target": "all",
        "use_kt": True,
        "kt_config": {"expert_format": "bf16", "threads": 1},
        "dataset_dir": str(data),
        "dataset": "sft",
        "template": "default",
        "cutoff_len": 64,
        "output_dir": str(output),
        "report_to": "none",
        "use_cpu": True,
        **overrides,
    }
