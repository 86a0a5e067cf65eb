"""Losses of a run whose micro-batches go through the layers together, beside those of the usual order.

    python tests/scripts/step_order_losses.py [--steps 50] [--tokens 128] [--families qwen3moe dsv3 ...]

Tiny models of several families, int8 and k4 experts, LoRA dropout and gradient checkpointing on. On a GPU layers are
recorded, but for the usual order. Exits with 1 if a loss
differs by more than 0.1%, relative to that of the usual order at the same step. With
few tokens it does: where rounding tips one token's routing, its loss is a visible part of the step's.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import runs
import torch
from tiny import write_checkpoint
from transformers import Trainer

FAMILIES = ("qwen3moe", "dsv3", "glm4", "gpt_oss", "mixtral")
MOST = 1e-3


def losses(
    base: Path, out: Path, fmt: str, together: int | str, steps: int, micro_batches: int, tokens: int
) -> torch.Tensor:
    """The loss of each step."""
    settings = {"expert_format": fmt, "micro_batches_together": together, "threads": 2, "cuda_graphs": together != 1}
    model = runs.adapted(base, settings=settings, lora_dropout=0.1)
    torch.manual_seed(1)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(3, 100, (steps * micro_batches, tokens))]
    own = {"max_steps": steps, "per_device_train_batch_size": 1, "gradient_accumulation_steps": micro_batches}
    args = runs.arguments(out, **own, save_strategy="no", learning_rate=1e-3, gradient_checkpointing=True)
    run = Trainer(model, args, train_dataset=data)
    run._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(data)  # type: ignore[method-assign]
    run.train()
    return torch.tensor(runs.losses(run), dtype=torch.float64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="Of a micro-batch. [%(default)s]")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    asked = parser.parse_args()
    failed = False
    for number, family in enumerate(asked.families):
        fmt = ("int8", "k4")[number % 2]
        with tempfile.TemporaryDirectory() as folder:
            base = write_checkpoint(family, Path(folder, "base"))
            ran = [
                losses(base, Path(folder, str(together)), fmt, together, asked.steps, asked.micro_batches, asked.tokens)
                for together in (1, "auto")
            ]
        usual, together = ran
        worst = float((together / usual - 1).abs().max())
        failed |= worst > MOST
        print(f"{family}, {fmt}: loss {usual[0]:.4f} to {usual[-1]:.4f}; worst difference {worst:.4%}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
