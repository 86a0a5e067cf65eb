"""What ktft replaces in vLLM. Quantization method, model loader and worker extension go in by vLLM's own ways."""

from __future__ import annotations

from ktft.hosts.patch import Patch

QUANT_METHOD = Patch(
    "vllm.model_executor.layers.linear.LinearBase",
    "quant_method",
    "ktft.serve.vllm.lora_linear:KtftLinearMethod",
    "A loaded layer adds LoRA to its product, or multiplies by its packed weight (KtftDenseMethod). vLLM calls "
    "get_quant_method before it is known which layers can have LoRA.",
    on_instances=True,
)
_SHORT = "On a CPU a loaded layer of which nothing special is asked skips what vLLM does in Python to find that out."
NORM_FORWARD = Patch(
    "vllm.model_executor.layers.layernorm.RMSNorm",
    "forward",
    "ktft.serve.vllm.short_paths:shorten",
    "On a CPU ktft computes RMS norms: vLLM's way is a chain of torch operations, each of which goes through memory.",
    on_instances=True,
    since="0.32.0",
)
ATTENTION_FORWARD = Patch(
    "vllm.model_executor.layers.attention.attention.Attention",
    "forward",
    "ktft.serve.vllm.short_paths:shorten",
    f"{_SHORT} ktft's threads compute its steps of a few tokens a request.",
    on_instances=True,
    since="0.32.0",
)
BLOCK_FORWARD = Patch(
    "vllm.model_executor.models.qwen3_moe.Qwen3MoeAttention",
    "forward",
    "ktft.serve.vllm.short_paths:shorten",
    "On a CPU ktft computes what an attention block, this or another of BLOCKS, does between its projections, and the "
    "whole block in steps of a few tokens a request.",
    on_instances=True,
    since="0.32.0",
)
EXPERTS_FORWARD = Patch(
    "vllm.model_executor.layers.fused_moe.runner.moe_runner.MoERunner",
    "forward",
    "ktft.serve.vllm.short_paths:shorten",
    f"{_SHORT} ktft chooses experts by softmax.",
    on_instances=True,
    since="0.32.0",
)
LAYER_FORWARD = Patch(
    "vllm.model_executor.models.qwen3_moe.Qwen3MoeDecoderLayer",
    "forward",
    "ktft.serve.vllm.short_paths:shorten",
    "On a CPU ktft computes this layer, or another of LAYERS, in one call in steps of a few tokens a request: what its "
    "parts do in Python takes a fifth of the time of one token.",
    on_instances=True,
    since="0.32.0",
)
LORA_REQUESTS = Patch(
    "vllm.entrypoints.openai.models.serving.OpenAIServingModels",
    "lora_requests",
    "ktft.serve.vllm.middleware:VllmClient",
    "Names of requests stand for the adapters that ktft has loaded. vLLM's own way to load one reads it with vLLM's "
    "LoRA manager, which has no LoRA on packed experts.",
    on_instances=True,
)
LOAD_LORA_MODEL = Patch(
    "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin",
    "load_lora_model",
    "ktft.serve.vllm.lora_manager:load_lora_model",
    "The model runner tells ktft's manager which adapter each token has. vLLM lets nobody choose the manager, and its "
    "own would wrap the layers.",
)
CACHE_KEYS = Patch(
    "vllm.v1.core.kv_cache_utils",
    "_gen_lora_extra_hash_keys",
    "ktft.serve.vllm.lora_manager:cache_keys",
    "A name may come to stand for another adapter. vLLM 0.24 knows KV cache by the adapter's name alone, so prompts "
    "would go on from what the one before has computed, and no setting changes that.",
)
OF_PROCESS = (LOAD_LORA_MODEL, CACHE_KEYS)
"""For the whole process of a server."""
OTHERS = (QUANT_METHOD, NORM_FORWARD, ATTENTION_FORWARD, BLOCK_FORWARD, EXPERTS_FORWARD, LAYER_FORWARD, LORA_REQUESTS)
"""Put on single objects."""
