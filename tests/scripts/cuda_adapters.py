"""vLLM on a GPU with nine adapters in one batch: `python tests/scripts/cuda_adapters.py --directory DIR`.

Writes a checkpoint of a few small layers and eight adapters with random values, of different ranks and on different
layers. The base and the eight then answer one prompt each: alone, all in one batch, and in batches of the same prompts
that all have one adapter. Log-probabilities must agree with the latter, and with those alone as far as the batch with
one adapter does; and differ from the base's. Adapters then go and come back while the graphs stay. Exits 1 if anything
else is found.

    python tests/scripts/cuda_adapters.py --directory /tmp/adapters --gpu-expert-memory 200M
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "serve"), str(Path(__file__).parents[1])]
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}

NOISE = 0.03
"""Nats between batches of different sizes, whose sums in bf16 differ."""
OPTIONS: list[dict] = [
    {"r": 16},
    {"target_modules": ["experts"], "std": 0.2},
    {"target_modules": ["q_proj", "o_proj"], "r": 3, "lora_alpha": 384},
    {"r": 1},
    {"r": 33},
    {"r": 5, "lora_alpha": 20},
    {"target_modules": ["v_proj"]},
    {"r": 8},
]


def prompt(number: int, tokens: int) -> list[int]:
    return [3 + (7 * number + 5 * i + i * i) % 1000 for i in range(tokens + number)]


def gap(found: tuple[list[int], torch.Tensor], expected: tuple[list[int], torch.Tensor]) -> float:
    """The largest difference of the log-probabilities as far as both continue with the same tokens."""
    same = len(found[1]) - len(found[0])
    for mine, other in zip(found[0], expected[0], strict=True):
        same += 1
        if mine != other:
            break
    return float((found[1] - expected[1])[:same].abs().max())


def main() -> int:
    from adapters import random_adapter
    from in_process import served
    from train_large import write_checkpoint

    from ktft.serve.vllm.command import GPU_WORKER
    from ktft.serve.vllm.families import compilation_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="for the checkpoint and the adapters")
    parser.add_argument("--gpu-expert-memory", default="0")
    parser.add_argument("--dense-format", default=None)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    args = parser.parse_args()
    model = args.directory / "model"
    if not model.exists():
        # Every token has all experts, so that rounding cannot tip the choice between two
        shape = {"experts": 8, "top_k": 8, "hidden_size": 512, "intermediate_size": 256, "vocabulary": 1024}
        own = {"model": "qwen3-30b-a3b", "cutoff": 512, "overflow": None, "fp8": False, "format": "k4", "layers": 3}
        write_checkpoint(argparse.Namespace(**own, **shape, threads=None), model)
        for i, options in enumerate(OPTIONS, start=1):
            random_adapter(model, args.directory / f"a{i}", seed=i, **{"std": 0.05} | options)
    names = tuple((f"a{i}", str(args.directory / f"a{i}")) for i in range(1, len(OPTIONS) + 1))
    vllm = {
        "worker_cls": GPU_WORKER, "max_num_seqs": 16, "max_model_len": 512, "kv_cache_memory_bytes": 1 << 28,
        "attention_backend": "TRITON_ATTN", "enforce_eager": args.eager, "enable_prefix_caching": False,
        "max_num_batched_tokens": 512, "max_loras": len(OPTIONS),
    }  # fmt: skip
    if not args.eager:
        vllm["compilation_config"] = compilation_config("qwen3_moe", True, 16)
    settings = {
        "adapters": names, "max_adapters": len(OPTIONS), "threads": None,
        "gpu_expert_memory": args.gpu_expert_memory, "dense_format": args.dense_format,
    }  # fmt: skip
    failed = 0
    with served(model, options=vllm, **settings) as running:
        for tokens in (12, 40):
            asked = [(prompt(number, tokens), number) for number in range(len(OPTIONS) + 1)]
            alone = [running.together([one], 12)[0] for one in asked]
            together = running.together(asked, 12)
            uniform = [running.together([(ids, number) for ids, _ in asked], 12) for _, number in asked]
            same = [batch[place] for place, batch in enumerate(uniform)]
            gaps = [gap(*pair) for pair in zip(together, alone, strict=True)]
            mixed = [gap(*pair) for pair in zip(together, same, strict=True)]
            noise = [gap(*pair) for pair in zip(same, alone, strict=True)]
            moved = [float((a[1] - b[1])[: len(b[1]) - 11].abs().max()) for a, b in zip(alone, uniform[0], strict=True)]
            print(f"{tokens} tokens and more, adapters move {rounded(moved)}; gaps between")
            print(f"  nine adapters and alone {rounded(gaps)}")
            print(f"  nine adapters and one, the same prompts {rounded(mixed)}")
            print(f"  one adapter, nine prompts and alone {rounded(noise)}", flush=True)
            allowed = [max(NOISE, 2 * each) for each in noise]
            failed += any(found > most for found, most in zip(gaps, allowed, strict=True))
            failed += max(mixed) > NOISE or min(moved[1:]) < 3 * NOISE
        before, base = running.together(asked, 12), running.together([(asked[5][0], 0)], 12)[0]
        running.remove_adapter(2)
        running.remove_adapter(5)
        gone = running.together([(asked[5][0], 0)], 12)[0]
        left = running.together([one for one in asked if one[1] not in (2, 5)], 12)
        running.add_adapter(20, Path(names[4][1]))
        running.add_adapter(21, Path(names[1][1]))
        renamed = [(ids, {2: 21, 5: 20}.get(number, number)) for ids, number in asked]
        again = running.together(renamed, 12)
        others = [each for number, each in enumerate(before) if number not in (2, 5)]
        kept = [gap(*pair) for pair in zip(left, others, strict=True)]
        back = [gap(*pair) for pair in zip(again, before, strict=True)]
        print(f"after a change: others {rounded(kept)}, all back {rounded(back)}, base {gap(gone, base):.3f}")
        failed += max(*kept, *back, gap(gone, base)) > NOISE
        print({lane: each["pairs"] for lane, each in running.status()["lanes"].items()})
    print("FAILED" if failed else "all adapters agree")
    return int(failed > 0)


def rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


if __name__ == "__main__":
    sys.exit(main())
