"""How SGLang is installed and started: its package, the command line of its server, and the environment."""

from __future__ import annotations

from collections.abc import Mapping

from ktft import versions
from ktft.serve.engine import Findings, Options
from ktft.serve.front.kv_cache import kv_token_bytes
from ktft.serve.runtime.settings import GRAPH_TOKENS, ServeSettings

PACKAGES = {"gpu": "sglang", "cpu": "sglang"}
_CPU_ARGUMENTS = ["--device", "cpu", "--attention-backend", "torch_native"]
KERNELS = "https://docs.sglang.io, CPU servers, has how SGLang's kernels are built for CPUs, which it needs to start"


def install(device: str) -> str:
    """The command that installs SGLang."""
    needed = f"; {KERNELS}" if device == "cpu" else ""
    return f"{versions.pip_install(PACKAGES[device])}, in an environment of its own{needed}"


def arguments(settings: ServeSettings, options: Options, found: Findings) -> list[str]:
    """The arguments of SGLang's server. The user's own come last, so that they win.

    Raises:
        ValueError: the weights around the experts would be packed, which ktft does with vLLM only.
    """
    if settings.dense_format is not None:
        raise ValueError(
            f"--dense-format {settings.dense_format} is not served with SGLang, which keeps the weights around the "
            "experts in the model's dtype; leave it out"
        )
    given = {
        "--model-path": settings.checkpoint,
        "--served-model-name": settings.base_name,
        "--host": options.host,
        "--port": options.port,
        "--quantization": "ktft",
        "--max-running-requests": options.max_num_seqs,
        "--context-length": found.max_model_len,
        "--max-total-tokens": _tokens(settings, found),
    }
    words = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
    words += _gpu_arguments(options.max_num_seqs) if found.gpu else _CPU_ARGUMENTS
    words.append("--disable-overlap-schedule")  # so that a step's tokens get out when its experts have been checked
    words.append("--skip-server-warmup")  # it would ask /generate, which ktft's gate does not let in
    if settings.adapter_slots:  # SGLang asks for the last two, and ktft's manager for neither
        words += ["--enable-lora", "--max-lora-rank", str(settings.max_lora_rank), "--lora-target-modules", "all"]
    return [*words, *options.extra]


def _gpu_arguments(max_num_seqs: int) -> list[str]:
    """A CUDA graph of the whole decode step for each number of sequences, since padding would cost the experts as much
    as tokens do. There is none of prefill, which looks at the routing.
    """
    sizes = range(1, min(max_num_seqs, GRAPH_TOKENS) + 1)
    return ["--cuda-graph-bs-decode", *map(str, sizes), "--cuda-graph-backend-prefill", "disabled"]


def _tokens(settings: ServeSettings, found: Findings) -> int | None:
    if found.kv_cache is None:
        return None
    from transformers import AutoConfig

    return found.kv_cache // kv_token_bytes(AutoConfig.from_pretrained(settings.checkpoint), latent=True)


def environment(given: Mapping[str, str], settings: ServeSettings, found: Findings) -> dict[str, str]:
    """The environment of SGLang's server, made from `given`.

    On a CPU torch and ktft get one thread a core each, since they compute in turn: a layer's attention, then its
    experts. Without the spin count, OpenMP's threads would spin on their cores for milliseconds while experts are
    computed.
    """
    from ktft import native

    own = dict(given) | {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}  # a health check would wait for a token
    if found.gpu:
        return own
    threads = settings.threads or int(native.topology()["cores"])
    return own | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "GOMP_SPINCOUNT": "10000",
    }
