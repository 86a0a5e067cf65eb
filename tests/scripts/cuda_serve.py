"""vLLM on a GPU with ktft's experts: `python tests/scripts/cuda_serve.py --directory DIR`.

Writes a converted checkpoint of Qwen3-30B-A3B's layers with random weights (as train_large.py does) and generates with
vLLM's own engine, each mode in a process of its own: eager, and with CUDA graphs of whole decode steps that hold the
CPU's experts. Both must give the same tokens, except at near ties. Prints tokens/s of decoding for each number of
requests, and the seconds that experts took in each lane. Exits 1 if the tokens differ or a mode fails.

    python tests/scripts/cuda_serve.py --directory /tmp/serve --layers 8 --requests 1 --requests 8
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NEAR = 0.02  # nats: the spacing of bf16 logits of a few units
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
        }
    },
}


def generate(args: argparse.Namespace, mode: str) -> dict[str, Any]:
    """The tokens that one process of vLLM generates, and its speed."""
    from vllm import LLM, SamplingParams

    from ktft.serve.runtime.served_model import current
    from ktft.serve.runtime.settings import ServeSettings
    from ktft.serve.vllm.command import GPU_WORKER

    settings = ServeSettings(
        str(args.directory / "model"), gpu_expert_memory=args.gpu_expert_memory, threads=args.threads
    )
    os.environ.update(settings.to_env())
    began = time.perf_counter()
    llm = LLM(
        str(args.directory / "model"),
        quantization="ktft",
        load_format="ktft",
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.5,
        attention_backend="TRITON_ATTN",
        enable_prefix_caching=False,
        disable_log_stats=True,
        worker_cls=GPU_WORKER,
        **MODES[mode],
    )
    found: dict[str, Any] = {name: {} for name in ("tokens", "logprobs", "rates", "seconds")}
    found["load"] = time.perf_counter() - began
    for requests in args.requests:
        prompts = [{"prompt_token_ids": [7 + request, *range(10, 40)]} for request in range(requests)]
        rates, outputs = [], []
        for length in (args.length, 1, args.length, 1, args.length):
            parameters = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, logprobs=2)
            before, began = current().status()["lanes"], time.perf_counter()
            outputs = llm.generate(prompts, parameters, use_tqdm=False)
            rates.append((length, time.perf_counter() - began))
            after = current().status()["lanes"]
        prefill = min(seconds for length, seconds in rates if length == 1)
        whole = min(seconds for length, seconds in rates if length > 1)
        found["tokens"][requests] = [list(output.outputs[0].token_ids) for output in outputs]
        found["logprobs"][requests] = [
            [sorted((each.logprob for each in row.values()), reverse=True)[:2] for row in output.outputs[0].logprobs]
            for output in outputs
        ]
        found["rates"][requests] = requests * (args.length - 1) / (whole - prefill)
        found["seconds"][requests] = {lane: after[lane]["seconds"] - before[lane]["seconds"] for lane in after}
        print(
            f"{mode}: {requests} requests: {found['rates'][requests]:.1f} tokens/s decoding, "
            f"{(whole - prefill) / (args.length - 1) * 1e3:.2f} ms a step, prefill {prefill * 1e3:.1f} ms; "
            f"experts' seconds in the last {found['seconds'][requests]}",
            file=sys.stderr,
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="for the checkpoint, which is kept")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--format", default="k4")
    parser.add_argument("--length", type=int, default=33, help="tokens to generate")
    parser.add_argument("--requests", type=int, action="append", help="at a time; default 1, 4 and 16")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--gpu-expert-memory", default=0)
    parser.add_argument("--mode", choices=list(MODES), help="internal: what one process does")
    args = parser.parse_args()
    args.requests = args.requests or [1, 4, 16]
    if args.mode:
        result = json.dumps(generate(args, args.mode))
        (args.directory / f"{args.mode}.json").write_text(result)
        return 0
    if not (args.directory / "model" / "ktft.json").exists():
        from train_large import write_checkpoint

        shape = {"experts": 128, "top_k": 8, "hidden_size": 2048, "intermediate_size": 768, "vocabulary": 151936}
        own = {"model": "qwen3-30b-a3b", "cutoff": 1024, "overflow": None, "fp8": False}
        write_checkpoint(argparse.Namespace(**vars(args), **shape, **own), args.directory / "model")
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    found = {}
    for mode in MODES:
        command = [sys.executable, __file__, *sys.argv[1:], "--mode", mode]
        failed = subprocess.run(command, timeout=300).returncode
        if failed:
            print(f"{mode}: ended with {failed}")
            return 1
        found[mode] = json.loads((args.directory / f"{mode}.json").read_text())
    return 0 if all([compare(found, str(requests)) for requests in args.requests]) else 1


def compare(found: dict[str, Any], requests: str) -> bool:
    """Compare the modes. They may differ where the two best tokens are closer than the noise of log-probabilities."""
    least, noise, parted = math.inf, 0.0, 0
    for eager, graphs, a, b in zip(
        *(found[mode]["tokens"][requests] for mode in MODES),
        *(found[mode]["logprobs"][requests] for mode in MODES),
        strict=True,
    ):
        at = next((i for i, pair in enumerate(zip(eager, graphs, strict=True)) if pair[0] != pair[1]), None)
        noise = max([noise, *(abs(x[0] - y[0]) for x, y in zip(a[:at], b[:at], strict=True))])
        if at is not None:
            parted += 1
            least = min(least, max(NEAR, noise) - min(a[at][0] - a[at][1], b[at][0] - b[at][1]))
    print(f"{requests} requests: {parted} part at a near tie or not; log-probabilities before that within {noise:.4f}")
    return parted == 0 or least >= 0


if __name__ == "__main__":
    sys.exit(main())
