"""The arguments of vLLM that a user adds after `--`: those that ktft refuses, and the one that it reads."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence

_PARALLEL = "ktft computes all experts in one process; leave it out"
_OWN = "ktft serve sets it itself; use {}"
REFUSED = {
    **dict.fromkeys(("model", "model-tag"), _OWN.format("ktft serve MODEL")),
    **{
        name: _OWN.format(f"--{name}")
        for name in ("host", "port", "served-model-name", "max-model-len", "max-num-seqs", "api-key", "max-lora-rank")
    },
    "kv-cache-memory-bytes": _OWN.format("--kv-cache-memory"),
    "config": "ktft checks arguments, and would not see those in the file; give them here",
    "hf-overrides": "it would replace what ktft sets; change config.json",
    **dict.fromkeys(
        ("compilation-config", "optimization-level", "cudagraph-capture-sizes", "max-cudagraph-capture-size"),
        "ktft chooses operations that are right for the model, and one CUDA graph for each number of sequences, since "
        "experts would otherwise compute padding; use --enforce-eager to do without graphs",
    ),
    "max-loras": _OWN.format("--max-adapters"),
    "load-format": "ktft loads the model itself",
    "quantization": "--expert-format chooses how experts are held",
    "worker-extension-cls": "ktft sets its own",
    "middleware": "ktft sets its own, which must see requests first",
    **dict.fromkeys(
        ("enable-lora", "lora-modules", "default-mm-loras"),
        "ktft applies adapters itself: give --adapter, or POST /v1/load_lora_adapter",
    ),
    **dict.fromkeys(
        (
            "tensor-parallel-size",
            "pipeline-parallel-size",
            "data-parallel-size",
            "decode-context-parallel-size",
            "prefill-context-parallel-size",
            "enable-expert-parallel",
            "enable-eplb",
            "nnodes",
            "distributed-executor-backend",
            "api-server-count",
            "headless",
        ),
        _PARALLEL,
    ),
    **dict.fromkeys(
        ("kv-offloading-size", "kv-offloading-backend"),
        "a KV cache outside vLLM's own would outlive a change of the adapter",
    ),
    **dict.fromkeys(
        ("speculative-config", "spec-method", "spec-model", "spec-tokens"),
        "--speculative-tokens lets the model's own prediction layer draft; ktft was not tested with other drafts",
    ),
    **dict.fromkeys(("enable-elastic-ep", "kv-transfer-config"), "ktft was not tested with it"),
    "worker-cls": "the worker is ktft's own",
    "cpu-offload-gb": "ktft keeps the experts in CPU memory itself",
    "enable-sleep-mode": "ktft cannot put its experts to sleep",
    "uds": "ktft serve listens at --host and --port",
    "grpc": "ktft serve has the OpenAI API only, and could not check these requests",
}
"""vLLM's options that ktft refuses, and why."""
_SHORT = {
    "tp": "tensor-parallel-size",
    "pp": "pipeline-parallel-size",
    "dp": "data-parallel-size",
    "dcp": "decode-context-parallel-size",
    "pcp": "prefill-context-parallel-size",
    "ep": "enable-expert-parallel",
    "n": "nnodes",
    "q": "quantization",
    "sc": "speculative-config",
    "asc": "api-server-count",
    "cc": "compilation-config",
    "O": "optimization-level",
}


def check_extra(extra: Iterable[str]) -> None:
    """Raise ValueError for an argument of vLLM that ktft sets itself or does not work with. The message names it."""
    for argument in extra:
        match = re.match(r"--?([a-zA-Z][\w-]*)", argument)
        if match is None:
            continue
        name = match[1].replace("_", "-")
        if argument.startswith("--"):  # vLLM also takes an unambiguous beginning of a name
            reasons = [reason for key, reason in REFUSED.items() if key.startswith(name.removeprefix("no-"))]
        else:  # short names may have a number behind them, as in -O3
            reasons = [REFUSED[_SHORT[short]] for short in (name, name.rstrip("0123456789")) if short in _SHORT]
        if reasons:
            raise ValueError(f"{argument.partition('=')[0]} cannot be passed on to vLLM: {reasons[0]}")


def allowed_origins(extra: Sequence[str]) -> tuple[str, ...]:
    """The web pages that may use the server, from vLLM's `--allowed-origins`. See `ktft.serve.engine.Engine`."""
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("--allowed-origins", default="[]")
    words = (re.sub(r"^--[\w-]+", lambda name: name[0].replace("_", "-"), word) for word in extra)
    try:
        text = parser.parse_known_args(list(words))[0].allowed_origins
        origins = json.loads(text)
    except (argparse.ArgumentError, ValueError) as error:
        raise ValueError(f"--allowed-origins: {error}; give a JSON list, as '[\"https://example.org\"]'") from None
    if not isinstance(origins, list) or not all(isinstance(each, str) for each in origins):
        raise ValueError(f"--allowed-origins is {text}; give a JSON list, as '[\"https://example.org\"]'")
    return tuple(origins)
