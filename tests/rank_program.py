"""A training program for `torchrun`, or for one process: runs of transformers' Trainer, one after another.

usage: rank_program.py JOBS.json [PROCESSES], with PROCESSES if torchrun does not start them. Each job is the arguments
of `train`, of `experts` if it has `tokens`, or of `gradients` if it names an adapter. Process 0 writes a run's losses
to `OUTPUT/losses.json`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import transformers
from accelerate.state import AcceleratorState
from host_graphs import record_on_host
from plots import leave_out
from rank_forks import fork
from runs import DATA, adapted, arguments, losses
from tp_gradients import gradients
from transformers import TrainerCallback

from ktft.adapters.peft import expert_layers

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
    generate: bool = False,
    stop: tuple[int, str] | None = None,
    of_rank: dict[str, dict[str, Any]] | None = None,
    fresh: bool = False,
    recorded: bool = False,
    **overrides: Any,
) -> None:
    """One run; `stop` ends a rank in it, `of_rank` gives ranks other arguments.

    `fresh`: as in an environment that asks for no FSDP, and after no run that did. `recorded`: the CPU records graphs,
    in this run and those after it.
    """
    if recorded:
        record_on_host(setattr)
    if fresh:
        for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
            del os.environ[name]
        AcceleratorState._reset_state(reset_partial_state=True)
    if (settings or {}).get("distributed"):
        import tp_on_cpu  # the older accelerate has nothing to change

        tp_on_cpu.allow()
    if FSDP_ASKED is None:  # accelerate leaves it on after a job with FSDP
        os.environ.pop("ACCELERATE_USE_FSDP", None)
    own = (of_rank or {}).get(os.environ.get("RANK", "0"), {})
    args = arguments(Path(output), **{"seed": 1, "ddp_find_unused_parameters": False} | overrides | own)
    model = adapted(Path(base), getattr(torch, dtype), {"threads": 1} | (settings or {}), **({"r": 2} | (lora or {})))
    callbacks: list[Any] = [Stop(*stop)] if stop else []
    data = (DATA * (examples // len(DATA) + 1))[:examples]
    run = transformers.Trainer(model, args, train_dataset=data, eval_dataset=DATA[:4], callbacks=callbacks)
    run.train(resume_from_checkpoint=resume)
    run.save_model()
    evaluated = run.evaluate()["eval_loss"]
    if generate:  # each rank another number of tokens
        model.generate(input_ids=torch.ones(1, 3, dtype=torch.long), max_new_tokens=2 + 3 * args.process_index)
    if args.process_index == 0:
        found = {"losses": losses(run), "norms": [e["grad_norm"] for e in run.state.log_history if "grad_norm" in e]}
        Path(output, "losses.json").write_text(json.dumps(found | {"eval": evaluated}))


def experts(base: str, output: str, tokens: list[int]) -> None:
    """One layer's experts, forward and backward, of `tokens` tokens by rank; each rank writes its tensors.

    One process has the tokens of all ranks, in their order.
    """
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    model = adapted(Path(base), settings={"expert_format": "bf16", "threads": 1}, r=2, init_lora_weights=False)
    layer = next(iter(expert_layers(model).values()))
    torch.manual_seed(3)
    every, count = sum(tokens), layer.experts.held.num_experts
    hidden, weights, grad = torch.randn(every, 64), torch.rand(every, 2), torch.randn(every, 64)
    index = torch.stack([torch.randperm(count)[:2] for _ in range(every)])
    begin = sum(tokens[:rank]) if ranks > 1 else 0
    own = slice(begin, begin + tokens[rank]) if ranks > 1 else slice(0, every)
    hidden, weights = hidden[own].requires_grad_(), weights[own].requires_grad_()
    out = layer(hidden, index[own], weights)
    out.backward(grad[own])
    found = {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad}
    for kind, projection, tensor in layer.tensors("default"):
        assert tensor.grad is not None
        for number, row in zip(layer.experts.held.numbers, tensor.grad, strict=True):
            found[f"{kind}.{projection}.{number}"] = row * ranks  # the mean over the ranks, as DDP has it
    Path(output).mkdir(exist_ok=True)
    torch.save(found, Path(output, f"{rank}-of-{ranks}.pt"))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    leave_out()
    gc.freeze()  # the Trainer collects garbage at the start of each run, among all that is imported
    if len(sys.argv) > 2:
        fork(int(sys.argv[2]))
    for job in json.loads(Path(sys.argv[1]).read_text()):
        work = experts if "tokens" in job else gradients if "adapter" in job else train
        work(**job)
