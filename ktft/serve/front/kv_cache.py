"""How much memory a server takes, and the context that its KV cache holds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ktft import config
from ktft.serve.engine import Engine, Options
from ktft.serve.front.headers import Model
from ktft.serve.runtime.settings import ServeSettings
from ktft.system import available_memory, readable

GIB = 1 << 30
# The KV cache gets one part in _SHARE of the memory that is left, at most _MOST unless the user asks for more, and at
# least _LEAST if it is there.
_SHARE, _MOST, _LEAST = 2, 8 * GIB, GIB // 4


def kv_token_bytes(model_config: Any, *, latent: bool) -> int:
    """Bytes of KV cache for a token, in 16 bits, in all layers that keep one.

    With `latent`, multi-head latent attention keeps its latent vectors, else its keys and values.
    """
    text = model_config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = sum("linear" not in kind for kind in kinds)
    rank = getattr(text, "kv_lora_rank", None)
    if rank and latent:
        return int(2 * layers * (rank + text.qk_rope_head_dim))
    if rank:
        return int(2 * 2 * layers * text.num_attention_heads * (text.qk_nope_head_dim + text.qk_rope_head_dim))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * 2 * layers * heads * head_dim)


def size_up(
    engine: Engine, settings: ServeSettings, options: Options, model: Model, *, gpu: bool
) -> tuple[int | None, int | None, list[str]]:
    """The context and the KV cache that fit, and a line for the user if the context is shorter than the model's own.

    On a GPU the engine measures what is left of the GPU's memory, and both are as in `options`.

    Raises:
        ValueError: the model does not fit, or the KV cache that was asked for.
    """
    left = _left(engine, settings, model, gpu=gpu)
    if gpu:
        return options.max_model_len, options.kv_cache, []
    from ktft.model.shortage import shortage

    block, per_token = engine.kv_block, kv_token_bytes(model.computed[0], latent=engine.latent_on_cpu)

    def cache_of(tokens: int) -> int:
        """Bytes of KV cache, which comes in whole blocks."""
        return per_token * block * -(-tokens // block)

    own = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0)) or None
    wished = options.max_model_len or own
    if options.kv_cache is None:
        enough = max(cache_of(wished or 0) * (options.max_num_seqs + 1), _LEAST)
        kv_cache = max(min(left // _SHARE, _MOST, enough), 0)
        if options.max_model_len:  # what was asked for must fit, if the memory is there
            kv_cache = max(kv_cache, min(left, cache_of(options.max_model_len)))
    else:
        kv_cache = options.kv_cache
        if kv_cache > left and not config.skip_memory_check():
            raise ValueError(f"{shortage('--kv-cache-memory', kv_cache, max(left, 0))}; give less")
    holds = kv_cache // per_token // block * block
    if options.max_model_len is not None and holds < options.max_model_len:
        needed = cache_of(options.max_model_len)
        raise ValueError(
            f"--max-model-len {options.max_model_len} needs {readable(needed)} of KV cache, there are "
            f"{readable(kv_cache)}, for {holds} tokens; give --max-model-len {holds} or less"
            + ("" if options.kv_cache is None else ", or more --kv-cache-memory")
        )
    if holds < block:
        raise ValueError(
            f"{readable(kv_cache)} of KV cache do not hold {block} tokens of {per_token} bytes each; give more "
            "--kv-cache-memory"
        )
    notes = []
    if wished is not None and holds < wished:
        wished = holds
        notes.append(
            f"prompt and answer may have {holds} tokens of the model's {own}: {readable(kv_cache)} are set aside for "
            "KV cache; give it more with --kv-cache-memory"
        )
    return wished, kv_cache, notes


def _left(engine: Engine, settings: ServeSettings, model: Model, *, gpu: bool) -> int:
    """Bytes of CPU memory that are left beside the model, the adapters and the server's processes, if those fit."""
    from ktft.model.dense_memory import served_dense
    from ktft.model.memory import footprint
    from ktft.model.shortage import by_cause, require_memory

    nodes, dense = settings.numa_nodes or 1, served_dense(settings.dense_format)
    need = footprint(model.computed[1], None, model.expert_format, threads=1, nodes=nodes, gpu=gpu, dense=dense)
    loaded = need.ram_bytes + engine.server_memory + _adapter_bytes(settings)
    what = f"serving {settings.checkpoint} with experts in {model.expert_format}"
    causes = by_cause(need.ram)
    require_memory(what, causes | {"the server itself and its adapters": loaded - sum(causes.values())})
    return available_memory() - loaded


def _adapter_bytes(settings: ServeSettings) -> int:
    """Bytes of the adapters in memory, where they are fp32: twice the files, which may hold 16 bits a value."""
    files = (file for _, path in settings.adapters for file in Path(path).glob("*.safetensors"))
    return 2 * sum(os.path.getsize(file) for file in files)
