"""Compare `ktft plan` with what training then takes: `python tests/scripts/plan_accuracy.py [--cuda] [CASE ...]`.

For each case a random checkpoint is written and planned with `ktft plan --json`. Then a new process trains some steps
with transformers' Trainer and LLaMA-Factory's settings, and peak RSS (VmHWM), GPU memory and seconds a step are
compared. `--cuda` adds the case that has all but the experts on the GPU. Prints a line of JSON for each case, and a
table of all. Exits 1 if memory is off by more than 10% or time by more than 30%. Needs 8 GB of memory and of disk
(TMPDIR), about half a minute a case, a quiet machine for the times, and no network.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from measuring import in_a_process, memory

MEMORY_TOLERANCE, TIME_TOLERANCE = 0.10, 0.30
WARM_STEPS = 2
WIDE: dict[str, Any] = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16}
QWEN = WIDE | {"moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 8,
               "num_key_value_heads": 4, "head_dim": 64}  # fmt: skip
DEEPSEEK = WIDE | {"moe_intermediate_size": 704, "n_routed_experts": 48, "num_experts_per_tok": 6,
                   "num_hidden_layers": 7, "num_key_value_heads": 16, "kv_lora_rank": 256, "qk_rope_head_dim": 32,
                   "qk_nope_head_dim": 64, "v_head_dim": 64}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One training: its checkpoint and LLaMA-Factory's keys."""

    name: str
    family: str
    sizes: dict[str, Any]
    recipe: dict[str, Any]
    kt_config: dict[str, Any] = field(default_factory=dict)
    cuda: bool = False


CASES = (
    Case("qwen3moe bf16", "qwen3moe", QWEN, {"cutoff_len": 256, "per_device_train_batch_size": 4},
         {"expert_format": "bf16"}),
    Case("qwen3moe int8, recompute, no checkpointing", "qwen3moe", QWEN,
         {"cutoff_len": 256, "per_device_train_batch_size": 2, "disable_gradient_checkpointing": True},
         {"expert_format": "int8", "activation": "recompute"}),
    Case("deepseek-v3 k4, rank 16", "dsv3", DEEPSEEK | {"q_lora_rank": 512},
         {"cutoff_len": 512, "per_device_train_batch_size": 2, "lora_rank": 16}, {"expert_format": "k4"}),
    Case("deepseek-v2 mxfp4, 2 passes, retain, no checkpointing", "dsv2", DEEPSEEK,
         {"cutoff_len": 512, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2,
          "disable_gradient_checkpointing": True}, {"expert_format": "mxfp4"}),
    Case("qwen3moe fp8, long, wide vocabulary, GPU", "qwen3moe", QWEN | {"vocab_size": 96000},
         {"cutoff_len": 1024, "per_device_train_batch_size": 2}, {"expert_format": "fp8"}, cuda=True),
)  # fmt: skip


def make(case: Case, path: Path) -> None:
    """Write the case's checkpoint quickly, by repeating a short run of random numbers."""
    import torch
    from tiny import COMMON, FAMILIES
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config_class, own = FAMILIES[case.family]
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config_class(**COMMON | own | case.sizes), dtype=torch.bfloat16)
    noise = torch.randn(1 << 20).mul_(0.02).to(torch.bfloat16)
    for tensor in model.state_dict().values():
        flat = tensor.view(-1)
        for at in range(0, flat.numel(), noise.numel()):
            flat[at : at + noise.numel()] = noise[: flat.numel() - at]
    model.save_pretrained(path)


def train(case: Case, path: Path, steps: int) -> dict[str, Any]:
    """Train, and report memory and times."""
    if not case.cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # otherwise the data loader's pinned memory would start CUDA
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments

    import ktft
    from ktft.adapters.reach import linear_names
    from ktft.native import ExpertLayer

    recipe, cuda, times, experts = case.recipe, case.cuda, [], []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            experts[-1] += time.perf_counter() - start
            return result

        return call

    vars_of_layer: Any = ExpertLayer
    vars_of_layer.forward, vars_of_layer.backward = timed(ExpertLayer.forward), timed(ExpertLayer.backward)

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            experts.append(0.0)
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize() if cuda else None
            times.append(time.perf_counter() - self.start)

    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.bfloat16,
        quantization_config=ktft.KtftConfig(**case.kt_config),
        device_map={"": 0 if cuda else "cpu"},
    )
    loading, loaded = time.perf_counter() - begin, memory("VmHWM")
    checkpointing = not recipe.get("disable_gradient_checkpointing", False)
    if checkpointing:
        model.enable_input_require_grads()
    target = recipe.get("lora_target", "all")
    rank = recipe.get("lora_rank", 8)
    targets = sorted(linear_names(model)) if target == "all" else target.split(",")
    model = ktft.get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))
    length, vocab = recipe["cutoff_len"], case.sizes["vocab_size"]
    batch, passes = recipe["per_device_train_batch_size"], recipe.get("gradient_accumulation_steps", 1)
    rows = [{"input_ids": torch.randint(3, vocab, (length,)).tolist()} for _ in range(batch * passes)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    arguments = TrainingArguments(
        str(path / "out"),
        max_steps=steps,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=passes,
        gradient_checkpointing=checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": True} if checkpointing else None,
        use_cpu=not cuda,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    ktft.Trainer(model, arguments, train_dataset=rows, callbacks=[Clock()]).train()
    free, total = torch.cuda.mem_get_info() if cuda else (0, 0)
    from ktft.model.experts import find_experts

    runtime = next(iter(find_experts(model).values())).layer.runtime
    return {
        "ram": memory("VmHWM"),
        "loaded": loaded,
        "vram": total - free,
        "allocated": torch.cuda.max_memory_allocated() if cuda else 0,
        "step": statistics.median(times[min(WARM_STEPS, steps - 1) :]),
        "experts": statistics.median(experts[min(WARM_STEPS, steps - 1) :]),
        "load": loading,
        "workspace": runtime.workspace_bytes,
    }


def prepare(cases: list[tuple[Case, Path]]) -> list[dict[str, Any]]:
    """Write the checkpoints and plan each. Returns the plans, with the row of the case's format as `row`."""
    from commands import invoke

    plans = []
    for case, path in cases:
        make(case, path)
        recipe = path / "train.yaml"
        recipe.write_text(json.dumps(case.recipe | {"kt_config": case.kt_config, "use_cpu": not case.cuda}))
        done = invoke("plan", path, recipe, "--json")
        if not done.stdout.startswith("{"):
            raise RuntimeError(f"ktft plan {path} {recipe}: {done.output}")
        told = json.loads(done.stdout)
        row = next(row for row in told["formats"] if row["format"] == case.kt_config["expert_format"])
        plans.append(told | {"row": row})
    return plans


def gpu_memory_in_use() -> int:
    """GPU memory of the driver and of other processes, read without a context of our own."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()[0]) << 20


def compare(case: Case, told: dict[str, Any], measured: dict[str, Any]) -> dict[str, Any]:
    """A case's line of JSON: predictions and measurements (bytes, seconds), and how far apart they are."""
    row = told["row"]
    pairs = {"ram": (row["ram_bytes"], measured["ram"]), "step_seconds": (row["step_seconds"], measured["step"])}
    if case.cuda:
        pairs["vram"] = (row["vram_bytes"], measured["vram"])
    return {
        "case": case.name,
        **{
            name: {
                "predicted": predicted,
                "measured": got,
                "off": round(predicted / got - 1, 4),
                "ok": abs(predicted / got - 1) <= (TIME_TOLERANCE if name == "step_seconds" else MEMORY_TOLERANCE),
            }
            for name, (predicted, got) in pairs.items()
        },
        "expert_parameters": told["model"]["expert_parameters"],
        "planned": {"ram": row["ram"], "vram": row["vram"], "step": row["step"], "load_seconds": row["load_seconds"]},
        "measured": measured,
        "machine": {name: told["machine"][name] for name in ("isa", "threads", "flops", "bandwidth", "gpu")},
    }


def show(lines: list[dict[str, Any]]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("case", title="planned / measured", box=None)
    kinds = {"ram": ("peak RSS, MiB", 2**20), "vram": ("GPU memory, MiB", 2**20), "step_seconds": ("s a step", 1)}
    for title, _ in kinds.values():
        table.add_column(title, justify="right")
    for line in lines:
        cells = []
        for name, (_, unit) in kinds.items():
            told = line.get(name)
            digits = 0 if unit > 1 else 3
            cells.append(
                f"{told['predicted'] / unit:,.{digits}f} / {told['measured'] / unit:,.{digits}f} "
                f"({told['off']:+.1%}{'' if told['ok'] else ', OFF'})"
                if told
                else "none"
            )
        table.add_row(line["case"], *cells)
    Console(width=160).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cuda", action="store_true", help="add the case that runs on the GPU")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps of each case")
    parser.add_argument("case", nargs="*", type=int, help=f"numbers of cases, 0 to {len(CASES) - 1}; all by default")
    arguments = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = os.environ["TQDM_DISABLE"] = "1"
    # Otherwise torch's idle threads spin on the cores that the experts use: docs/guide/install.md
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    chosen = [case for case in ([CASES[n] for n in arguments.case] or CASES) if arguments.cuda or not case.cuda]
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        cases = [(case, Path(folder) / str(number)) for number, case in enumerate(chosen)]
        for (case, path), told in zip(cases, in_a_process(prepare, cases), strict=True):
            in_use = gpu_memory_in_use() if case.cuda else 0
            measured = in_a_process(train, case, path, arguments.steps)
            measured["vram"] -= in_use
            lines.append(compare(case, told, measured))
            print(json.dumps(lines[-1]), flush=True)
            shutil.rmtree(path)
    show(lines)
    return int(
        not all(told["ok"] for line in lines for told in line.values() if isinstance(told, dict) and "ok" in told)
    )


if __name__ == "__main__":
    sys.exit(main())
