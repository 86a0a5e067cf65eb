"""What ktft stands in for in SGLang. The quantization method goes in by SGLang's own way; SGLang's registry of hooks,
which it has for plugins, puts the rows of `HOOKED` in force.
"""

from __future__ import annotations

from ktft.hosts.patch import Patch

GET_MODEL_LOADER = Patch(
    "sglang.srt.model_loader.loader",
    "get_model_loader",
    "ktft.serve.sglang.hooks:get_model_loader",
    "A model of the quantization method ktft is loaded by ktft's loader. SGLang's list of loaders is fixed.",
)
INIT_LORA_MANAGER = Patch(
    "sglang.srt.model_executor.model_runner.ModelRunner",
    "init_lora_manager",
    "ktft.serve.sglang.hooks:init_lora_manager",
    "The model runner tells ktft's manager which adapter each request has. SGLang lets nobody choose the manager, and "
    "its own would wrap the layers.",
)
INIT_LORA = Patch(
    "sglang.srt.managers.tokenizer_manager.TokenizerManager",
    "init_lora",
    "ktft.serve.sglang.hooks:init_lora",
    "Names of requests stand for the adapters that ktft has loaded. SGLang's own registry gives an adapter its name as "
    "it is loaded, and none can take another's place while requests of that are in flight.",
)
RESOLVE_LORA_PATH = Patch(
    "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase",
    "_resolve_lora_path",
    "ktft.serve.sglang.hooks:resolve_lora_path",
    "The name of a request's model says which adapter computes it, as with OpenAI's API. SGLang takes BASE:ADAPTER, or "
    "a field of its own, of which ktft's gate knows nothing.",
)
GET_INTERNAL_STATE = Patch(
    "sglang.srt.managers.scheduler.Scheduler",
    "get_internal_state",
    "ktft.serve.sglang.hooks:get_internal_state",
    "The HTTP process learns what the experts have computed. SGLang has no way to ask its scheduler anything else.",
)
FORWARD_BATCH_GENERATION = Patch(
    "sglang.srt.managers.tp_worker.TpModelWorker",
    "forward_batch_generation",
    "ktft.serve.sglang.hooks:forward_batch_generation",
    "On a GPU residents change between two steps, and nothing in a CUDA graph can raise what experts on the CPU met. "
    "SGLang calls no plugin around a step.",
)
HOOKED = (
    GET_MODEL_LOADER,
    INIT_LORA_MANAGER,
    INIT_LORA,
    RESOLVE_LORA_PATH,
    FORWARD_BATCH_GENERATION,
    GET_INTERNAL_STATE,
)
"""For the whole process of a server, by SGLang's hooks."""
