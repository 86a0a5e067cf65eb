"""A training program for `torchrun`, or for one process: runs of transformers' Trainer, one after another.

usage: rank_program.py JOBS.json. Each job is the arguments of `train`. A job's process 0 writes its losses to
`OUTPUT/losses.json`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from runs import DATA, adapted, arguments, losses
from transformers import TrainerCallback

import ktft

FSDP_ASKED = os.environ.get("ACCELERATE_USE_FSDP")


class Stop(TrainerCallback):
    """Ends one rank in the middle of a run: by a signal, or by an exception."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank, self.how = rank, how

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2 and args.process_index == self.rank:
            if self.how == "error":
                raise MemoryError("no memory left for this test")
            os.kill(os.getpid(), getattr(signal, self.how))


def train(
    base: str,
    output: str,
    *,
    dtype: str = "float32",
    settings: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    resume: bool | str = False,
    examples: int = 8,
    stop: tuple[int, str] | None = None,
    of_rank: dict[str, dict[str, Any]] | None = None,
    **overrides: Any,
) -> None:
    """One run; `stop` ends a rank in it, `of_rank` gives ranks other arguments."""
    if FSDP_ASKED is None:  # accelerate leaves it on after a job with FSDP
        os.environ.pop("ACCELERATE_USE_FSDP", None)
    own = (of_rank or {}).get(os.environ.get("RANK", "0"), {})
    args = arguments(Path(output), **{"seed": 1, "ddp_find_unused_parameters": False} | overrides | own)
    model = adapted(Path(base), getattr(torch, dtype), {"threads": 1} | (settings or {}), **({"r": 2} | (lora or {})))
    callbacks: list[Any] = [Stop(*stop)] if stop else []
    data = (DATA * (examples // len(DATA) + 1))[:examples]
    run = transformers.Trainer(model, args, train_dataset=data, eval_dataset=DATA[:3], callbacks=callbacks)
    run.train(resume_from_checkpoint=resume)
    run.save_model()
    evaluated = run.evaluate()["eval_loss"]
    if args.process_index == 0:
        found = {"losses": losses(run), "norms": [e["grad_norm"] for e in run.state.log_history if "grad_norm" in e]}
        Path(output, "losses.json").write_text(json.dumps(found | {"eval": evaluated}))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    for job in json.loads(Path(sys.argv[1]).read_text()):
        train(**job)
    _ = ktft
