"""FSDP2 beside DDP on two GPUs: losses, adapters, optimizer states, a resumed run, and the GPU memory that each takes.

    python tests/scripts/cuda_fsdp.py [--processes 2] [--layers 12]

Needs a GPU for each process, and a minute or two. It writes a model of random weights into a temporary folder. Exits 1
if a line says FAIL.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Trainer, TrainerCallback, TrainingArguments

import ktft

STEPS = 8
TOLERANCE = 0.005  # relative, of losses
LESS = 0.75  # the most of DDP's peak memory that FSDP2 may take on two GPUs
FSDP = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}
RUNS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": FSDP,
    "resumed": {**FSDP, "resume": "ddp"},
    "offload": {"fsdp": "full_shard auto_wrap offload", "fsdp_config": {"version": 2}, "steps": 4},
}


def write_model(folder: Path, layers: int) -> None:
    """Random weights, most of them around the experts: about 38 MB a layer in bf16."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "decoder_sparse_step": 1}
    config = Qwen3MoeConfig(
        vocab_size=8192, num_hidden_layers=layers, intermediate_size=256, tie_word_embeddings=False, **sizes, **experts
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


class Memory(TrainerCallback):
    """The most GPU memory that steps take."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == args.max_steps - 3:
            torch.cuda.reset_peak_memory_stats()


def work(name: str, model: str, folder: str) -> None:
    """One run, in one of the processes that torchrun starts."""
    given = dict(RUNS[name])
    resume, steps = given.pop("resume", None), given.pop("steps", STEPS)
    args = TrainingArguments(
        output_dir=f"{folder}/{name}",
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=4,
        bf16=True,
        seed=1,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        **given,
    )
    settings = ktft.KtftConfig(expert_format="bf16", placement="cpu")
    loaded = AutoModelForCausalLM.from_pretrained(model, quantization_config=settings, dtype=torch.bfloat16)
    torch.manual_seed(0)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = ktft.get_peft_model(loaded, lora)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    rows = torch.randint(0, 8192, (64, 256), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row, "labels": row} for row in rows]
    run = Trainer(adapted, args, train_dataset=data, callbacks=[Memory])
    before = torch.cuda.max_memory_allocated()
    run.train(resume_from_checkpoint=f"{folder}/{resume}/checkpoint-4" if resume else None)
    peak = torch.cuda.max_memory_allocated()
    run.save_model()
    if args.process_index == 0:
        history = run.state.log_history
        found = {key: [each[key] for each in history if key in each] for key in ("loss", "grad_norm")}
        divided = sum(hasattr(each, "_local_tensor") for each in adapted.parameters())
        cpu = all(p.device.type == "cpu" for n, p in adapted.named_parameters() if ".experts." in n)
        found |= {"peak": peak, "placed": before, "divided": divided, "experts on the CPU": cpu}
        Path(folder, f"{name}.json").write_text(json.dumps(found))


def start(name: str, model: Path, folder: Path, processes: int) -> dict[str, Any] | None:
    """Run `work` in several processes; what it found, or None if it failed."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, __file__, "--work", name, str(model), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ))
    if done.returncode:
        print(done.stdout[-6000:])
        return None
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


failed = False


def tell(good: bool, what: str) -> None:
    """One line of the result."""
    global failed
    failed |= not good
    print("PASS" if good else "FAIL", what, flush=True)


def apart(one: list[float], two: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, two, strict=True))


def far(one: Path, two: Path) -> float:
    """The relative distance of two adapters."""
    a, b = load_file(one / "adapter_model.safetensors"), load_file(two / "adapter_model.safetensors")
    assert a.keys() == b.keys()
    square = sum(float((a[name].double() - b[name].double()).square().sum()) for name in a)
    return (square / sum(float(b[name].double().square().sum()) for name in a)) ** 0.5


def compare(found: dict[str, dict[str, Any] | None], folder: Path) -> None:
    ddp, fsdp, resumed, offload = (found[name] for name in RUNS)
    if ddp is None or fsdp is None:
        return
    tell(fsdp["divided"] > 0 and ddp["divided"] == 0, f"FSDP2 divides {fsdp['divided']} parameters")
    tell(fsdp["experts on the CPU"], "LoRA on experts stays on the CPU")
    for key in ("loss", "grad_norm"):
        difference = apart(fsdp[key], ddp[key])
        tell(
            difference <= (TOLERANCE if key == "loss" else 0.03),
            f"{key} of {len(ddp[key])} steps: largest difference from DDP {difference:.3%}",
        )
    distance = far(folder / "fsdp", folder / "ddp")
    tell(distance <= 0.02, f"adapter: relative distance from DDP's {distance:.2e}")
    states = [torch.load(folder / name / "checkpoint-4/optimizer.pt")["state"] for name in ("ddp", "fsdp")]
    shapes = [{(at, key): tuple(torch.as_tensor(v).shape) for at in s for key, v in s[at].items()} for s in states]
    tell(shapes[0] == shapes[1], "optimizer.pt has the same tensors")
    if resumed is not None:
        difference = apart(resumed["loss"][-4:], ddp["loss"][-4:])
        tell(difference <= TOLERANCE, f"resumed under FSDP2 from DDP's checkpoint: losses differ by {difference:.3%}")
    if offload is not None:
        difference = apart(offload["loss"], ddp["loss"][:4])
        tell(difference <= TOLERANCE, f"with offload: losses differ by {difference:.3%}")
    peaks = {name: each["peak"] / 2**20 for name, each in found.items() if each is not None}
    told = ", ".join(f"{name} {peak:,.0f} MiB" for name, peak in peaks.items())
    tell(peaks["fsdp"] < LESS * peaks["ddp"], f"peak GPU memory of a step: {told}")


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        return work(*sys.argv[2:])
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    if torch.cuda.device_count() < options.processes:
        sys.exit(f"this needs {options.processes} GPUs, there are {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model", options.layers)
        found = {}
        for name in RUNS:
            found[name] = start(name, folder / "model", folder, options.processes)
            tell(found[name] is not None, f"{name} runs")
        compare(found, folder)
    sys.exit(failed)


if __name__ == "__main__":
    main()
