"""Which families does the installed vLLM serve with ktft's experts, and does it compute what training computes?

For each family of tests/tiny.py, a process of its own serves a tiny checkpoint, and the log-probabilities of a prompt's
tokens are compared with those of transformers' model with ktft's experts. Needs vLLM and no GPU. For instance:

    python tests/scripts/serve_families.py --families qwen3moe mixtral [--dense-format int8]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "serve")]

PROMPT = list(range(10, 42))
BOUND = 0.2  # for the mean difference of log-probabilities, relative to the one without any routed expert
# Changes to the checkpoints of tests/tiny.py that vLLM cannot serve: attention on its CPU backend needs heads of 32 or
# more
HEADS: dict[str, Any] = {"head_dim": 32}
TWO_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
MLA: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2moe": TWO_HEADS,
    "qwen3moe": HEADS,
    "qwen3next": {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "qwen3_5": HEADS,
    "qwen3_5_text": HEADS,
    "qwen3vl": HEADS,
    "dsv2": MLA | {"routed_scaling_factor": 8.0},  # otherwise the experts hardly matter
    "dsv3": MLA,
    "kimi_k2": MLA,
    "glm4": HEADS,
    "glm5": MLA,
    "minimax": HEADS | {"rotary_dim": 16},
    "gpt_oss": HEADS,
    "mixtral": TWO_HEADS,
    "olmoe": {"num_attention_heads": 2, "num_key_value_heads": 2},
    "ernie": TWO_HEADS,
}


def trained(checkpoint: Path, dense_format: str | None) -> list[list[float]]:
    """Log-probabilities of the prompt's tokens after the first by transformers' model with ktft's experts, and then
    without any routed expert.
    """
    import torch
    from transformers import AutoConfig

    from ktft.model.experts import find_experts
    from ktft.model.meta import auto_class
    from ktft.model.quantizer import KtftConfig

    model = auto_class(AutoConfig.from_pretrained(checkpoint)).from_pretrained(
        checkpoint,
        quantization_config=KtftConfig(expert_format="bf16", threads=1, dense_format=dense_format),
        dtype=torch.bfloat16,
    )
    ids = torch.tensor([PROMPT])

    def log_probabilities() -> list[float]:
        with torch.no_grad():
            rows = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        return [float(row[token]) for row, token in zip(rows, PROMPT[1:], strict=True)]

    found = [log_probabilities()]
    for experts in find_experts(model).values():
        experts.register_forward_hook(lambda module, args, output: torch.zeros_like(output))
    return [*found, log_probabilities()]


def served(checkpoint: Path, dense_format: str | None) -> list[float]:
    """The same log-probabilities by vLLM."""
    import torch
    from in_process import served

    from ktft.serve.vllm.families import compilation_config, of

    model_type = json.loads((checkpoint / "config.json").read_text())["model_type"]
    options = {"max_num_seqs": 2, "disable_log_stats": True, "hf_overrides": of(model_type).overrides}
    options["compilation_config"] = compilation_config(model_type, torch.cuda.is_available(), 2)
    own = {"expert_format": "bf16", "adapter_swap": False, "dense_format": dense_format}
    with served(checkpoint, options=options, **own) as running:
        return running.logprobs(PROMPT).tolist()


def examine(family: str, dense_format: str | None) -> str:
    """Examine a family. Returns a line about it."""
    with tempfile.TemporaryDirectory() as folder:
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from tiny import write_checkpoint;"
            "import json; write_checkpoint(sys.argv[2], Path(sys.argv[3]), **json.loads(sys.argv[4]))"
        )
        tests, overrides = str(Path(__file__).parents[1]), json.dumps(OVERRIDES.get(family, {}))
        subprocess.run(
            [sys.executable, "-c", code, tests, family, folder, overrides], check=True, capture_output=True, text=True
        )
        found = {}
        for side in ("trained", "served"):
            command = [sys.executable, __file__, "--side", side, "--checkpoint", folder]
            command += ["--dense-format", dense_format] if dense_format else []
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                Path(f"{tempfile.gettempdir()}/serve_families.{family}.{side}.log").write_text(
                    done.stdout + done.stderr
                )
                lines = [line for line in (done.stdout + done.stderr).splitlines() if re.search(r"Error\b.*: ", line)]
                return f"{family}: {side}: failed: {lines[-1][:400] if lines else done.returncode}"
            found[side] = json.loads(done.stdout.splitlines()[-1])
    computed, without = found["trained"]
    mean, effect = difference(computed, found["served"]), difference(computed, without)
    verdict = "ok" if mean < BOUND * effect else "DIFFERS"
    return f"{family}: {verdict}: served {mean:.4f} from trained, without routed experts {effect:.4f}"


def difference(one: list[float], other: list[float]) -> float:
    """The mean absolute difference of log-probabilities."""
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", metavar="FAMILY", help="names of tests/tiny.py; by default all")
    parser.add_argument("--dense-format", help="of the weights around the experts, on both sides; by default bf16")
    parser.add_argument("--side", choices=("trained", "served"), help="internal: what one process does")
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    if args.side:
        sides = {"trained": trained, "served": served}
        print(json.dumps(sides[args.side](args.checkpoint, args.dense_format)), flush=True)
        return
    from tiny import FAMILIES, MORE_FAMILIES

    known = [*FAMILIES, *MORE_FAMILIES]
    if unknown := {*(args.families or ())} - {*known}:
        parser.error(f"tests/tiny.py has no {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    for family in args.families or known:
        print(examine(family, args.dense_format), flush=True)


if __name__ == "__main__":
    main()
