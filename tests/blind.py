"""Tiny configurations of models with routed experts that have no row in ktft's table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_newer import LATENT
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

SMALL: dict[str, Any] = {
    **LATENT,
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "num_experts": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "router_jitter_noise": 0.0,
    "input_jitter_noise": 0.0,
}
"""Settings, of which a family gets those that its configuration has."""

SAM = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64}
SAM |= {"mlp_dim": 32, "downsample_channels": [16, 32], "global_attn_indexes": [0]}
SEES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION = SEES | {"num_heads": 2, "depth": 1, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
AUDIO = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32, "output_dim": 64}
OCR = {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_key_value_heads": 4}
SEQUENCE = {"d_model": 64, "d_kv": 16, "d_ff": 32, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
SEQUENCE |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
SEQUENCE |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "decoder_start_token_id": 0}
SECTIONS = {"rope_type": "default", "mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5, "rope_theta": 1e4}
ROPE = {"rope_theta": 1e4, "kv_n_heads": 2}
HALF = {"out_hidden_size": 64, "projector_hidden_size": 32}
CASES: dict[str, dict[str, Any]] = {
    "aria": {"moe_num_experts": 8, "moe_topk": 2, "intermediate_size": 32},
    "axk1": {"head_dim": 8, "num_key_value_heads": 4},
    "axk2": {"head_dim": 8, "num_key_value_heads": 4, "index_head_dim": 16, "index_n_heads": 2, "index_topk": 4},
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "cohere2_moe": {},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": ROPE,
        "ffn_config": {"ffn_hidden_size": 32, "hidden_size": 64},
    },
    "deepseek_ocr2": OCR | {"WHOLE": {"vision_config": {"sam_config": SAM, "encoder_config": SEES}}},
    "diffusion_gemma": {"WHOLE": {"vision_config": SEES}},
    "dots1": {},
    "dots3_note": {"num_key_value_heads": 4},
    "ernie4_5_vl_moe": {"head_dim": 16, "moe_intermediate_size": [32, 32], "WHOLE": {"vision_config": VISION}},
    "exaone_moe": {},
    "flex_olmo": {},
    "flint": {},
    "glm4v_moe": {"rope_parameters": SECTIONS, "WHOLE": {"vision_config": VISION}},
    "granitemoe": {},
    "granitemoe_swa": {},
    "granitemoehybrid": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "inkling": {},
    "inkling2": {},
    "jamba": {},
    "jetmoe": {},
    "kolibri1": {},
    "laguna": {},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention"], "num_dense_layers": 1},
    "mellum": {},
    "minimax": {},
    "muse_spark": {"WHOLE": {"vision_config": SEES, "audio_config": {"out_hidden_size": 64}} | HALF},
    "nemotron_h": {},
    "nllb_moe": SEQUENCE | {"num_experts": 4, "encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "openai_privacy_filter": {},
    "phimoe": {},
    "qwen3_omni_moe": {"WHOLE": {"vision_config": VISION, "audio_config": AUDIO | {"downsample_hidden_size": 32}}},
    "solar_open": {},
    "step3p7": {},
    "switch_transformers": SEQUENCE | {"num_experts": 4},
    "unlimited_ocr": OCR | {"WHOLE": {"vision_config": {"sam_config": SAM, "encoder_config": SEES}}},
    "zaya": {"num_experts_per_tok": 1},
}
"""Folder of transformers' models -> settings of its own."""

TYPES = {
    "aria": "aria_text",
    "dots3_note": "dots3_note_text",
    "inkling": "inkling_text",
    "inkling2": "inkling2_text",
    "nllb_moe": "nllb-moe",
    "qwen3_omni_moe": "qwen3_omni_moe_thinker",
}
"""Where a folder's model type has another name, or the model of its text alone is enough."""


def config_of(name: str) -> PreTrainedConfig:
    """The tiny configuration of a family."""
    model_type, own = TYPES.get(name, name), dict(CASES[name])
    kind = type(AutoConfig.for_model(model_type))
    text = kind.sub_configs.get("text_config")
    if text is None:
        return kind(**_known(kind, SMALL) | {key: value for key, value in own.items() if key != "WHOLE"})
    whole = own.pop("WHOLE", {})
    return kind(text_config=_known(text, SMALL) | own, **whole)


def _known(kind: type[PreTrainedConfig], settings: dict[str, Any]) -> dict[str, Any]:
    plain = {*kind().to_dict(), *kind.attribute_map}
    return {key: value for key, value in settings.items() if key in plain}


def auto_of(config: PreTrainedConfig) -> Any:
    """The Auto class that makes a model of this configuration, with logits if one does."""
    names = ("CausalLM", "ImageTextToText", "Seq2SeqLM", "TokenClassification")
    autos = [getattr(transformers, f"AutoModelFor{name}") for name in names] + [transformers.AutoModel]
    return next(auto for auto in autos if type(config) in auto._model_mapping)


def make(config: PreTrainedConfig, path: Path) -> None:
    """Write a random checkpoint in bf16, as transformers would save one."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto_of(config).from_config(config).parameters())
    assert size < 1.5e8, f"{size} parameters are not tiny"
    torch.manual_seed(0)
    model = auto_of(config).from_config(config)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            tensor.data.copy_(torch.linspace(-0.1, 0.1, tensor.numel()).view_as(tensor))
    model.to(torch.bfloat16).save_pretrained(path)


def load_stock(path: Path, config: PreTrainedConfig, quantization: Any = None) -> nn.Module:
    """Load the stock model, or one with ktft's experts, in fp32."""
    given = {} if quantization is None else {"quantization_config": quantization}
    torch.manual_seed(0)
    return auto_of(config).from_pretrained(path, dtype=torch.float32, **given)
